"""An operator moves a session with `kedge sessions move`, between replica processes, with a real log."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import httpx
from served_cluster import ServedCluster, eventually
from session_client import Conversation, random_tokens

KEDGE = Path(sys.executable).with_name("kedge")


def move(cluster: ServedCluster, session_id: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [KEDGE, "sessions", "move", session_id, "--url", cluster.url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)


def test_it_goes_on_at_the_replica_that_was_named(cluster: ServedCluster, client: httpx.Client) -> None:
    rng = random.Random(21)
    session = Conversation.open(client)
    session.turn(random_tokens(rng, 60))
    opened = cluster.sessions()[session.session_id]
    owner, epoch = opened["replica_id"], opened["epoch"]
    (other,) = set(cluster.replicas()) - {owner}

    refused = move(cluster, session.session_id, "--to", "nobody")
    assert (refused.returncode, refused.stderr.startswith("kedge sessions move: 400: ")) == (1, True)
    session.turn(random_tokens(rng, 5))  # checks that its KV is still there

    moved = move(cluster, session.session_id, "--to", other)
    assert moved.stdout == f"{session.session_id}: moved from {owner} to {other}, epoch {epoch + 1}\n", (
        moved.stderr
    )
    assert cluster.sessions()[session.session_id]["replica_id"] == other
    session.exact_turn(random_tokens(rng, 5), resumed=True)
    session.turn(random_tokens(rng, 5))

    back = move(cluster, session.session_id)
    assert back.stdout == f"{session.session_id}: moved from {other} to {owner}, epoch {epoch + 2}\n", (
        back.stderr
    )
    session.exact_turn(random_tokens(rng, 5), resumed=True)
    session.close()
    eventually(lambda: client.get("/v1/kedge/audit").json()["clean"])
    assert client.post("/flush_cache").status_code == 200
    eventually(lambda: cluster.pages()["free"] == cluster.pages()["total"])
