"""Forks through HTTP and real replicas. They share KV, continue independently, outlive each other and survive a
crash."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import httpx
from served_cluster import ServedCluster, eventually
from session_client import Conversation, random_tokens

KEDGE = Path(sys.executable).with_name("kedge")


def forked(parent: Conversation, length: int | None = None) -> Conversation:
    """A fork of `parent`. Checks that it has the parent's history and KV."""
    body = {} if length is None else {"length": length}
    reply = parent.client.post(f"/v1/kedge/sessions/{parent.session_id}/fork", json=body)
    assert reply.status_code == 200, reply.text
    made = reply.json()
    history = parent.history[:length]
    assert made["tokens"] == len(history)
    assert made["cached_tokens"] in (len(history), len(history) - 1)
    return Conversation(parent.client, made["session_id"], history)


def check_against_a_fresh_session(client: httpx.Client, session: Conversation, new: list[int]) -> None:
    """The next turn answers as a new session does that gets the whole history as its first input."""
    fresh = Conversation.open(client)
    fresh.turn(session.history + new, resumed=True)  # may find cached prefixes
    session.turn(new)  # checks that it found its KV
    assert session.history == fresh.history
    fresh.close()


def books_are_empty(cluster: ServedCluster, client: httpx.Client) -> bool:
    assert client.post("/flush_cache").status_code == 200
    pages = cluster.pages()
    return pages["free"] == pages["total"] and pages["leaked"] == 0


def test_forks_go_on_from_their_parents_history(cluster: ServedCluster, client: httpx.Client) -> None:
    rng = random.Random(11)
    parent = Conversation.open(client)
    for _ in range(2):
        parent.turn(random_tokens(rng, 60))
    child, early = forked(parent), forked(parent, 50)
    grandchild = forked(child, 100)
    ledger = cluster.sessions()
    assert len({ledger[s.session_id]["replica_id"] for s in (parent, child, early, grandchild)}) == 1
    assert (ledger[early.session_id]["tokens"], ledger[early.session_id]["turns"]) == (50, 0)

    check_against_a_fresh_session(client, parent, random_tokens(rng, 7))
    check_against_a_fresh_session(client, child, random_tokens(rng, 7))
    parent.close()
    for session in (grandchild, early, child):
        check_against_a_fresh_session(client, session, random_tokens(rng, 5))
    child.close()
    grandchild.turn(random_tokens(rng, 3))
    audit = client.get("/v1/kedge/audit").json()
    assert audit["clean"], audit
    assert {each["replica_id"] for each in audit["replicas"]} == set(cluster.replicas())
    for session in (grandchild, early):
        session.close()
    eventually(lambda: books_are_empty(cluster, client))
    done = subprocess.run([KEDGE, "audit", "--url", cluster.url], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "clean"), done.stdout + done.stderr


def test_a_fork_outlives_its_replica(cluster: ServedCluster, client: httpx.Client) -> None:
    rng = random.Random(12)
    parent = Conversation.open(client)
    parent.turn(random_tokens(rng, 40))
    child, late = forked(parent, 30), forked(parent)
    late.turn(random_tokens(rng, 4))
    victim = cluster.sessions()[parent.session_id]["replica_id"]
    cluster.kill(cluster.replicas()[victim]["pid"])
    reply = client.post(f"/v1/kedge/sessions/{parent.session_id}/fork", json={"length": 20})
    assert reply.status_code == 200, reply.text
    made = reply.json()
    assert (made["tokens"], made["cached_tokens"]) == (20, 0)
    orphan = Conversation(client, made["session_id"], parent.history[:20])
    for session in (parent, child, late, orphan):
        new = random_tokens(rng, 6)
        session.exact_turn(new, resumed=True)
        session.close()
    eventually(lambda: len(cluster.replicas()) == 2, 90)
    eventually(lambda: client.get("/v1/kedge/audit").json()["clean"])
