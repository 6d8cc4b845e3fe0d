"""Sessions stay on their replica, find their KV there, and leave nothing behind."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
from served_cluster import ServedCluster, eventually
from session_client import Conversation, generate_once, random_tokens

NUM_SESSIONS = 32
NUM_TURNS = 10
AT_ONCE = 6
"""Too few to crowd a replica. Sessions would leave a crowded one."""


def run_session(cluster: ServedCluster, seed: int) -> Conversation:
    rng = random.Random(seed)
    with cluster.client() as client:
        session = Conversation.open(client)
        opened = cluster.sessions()[session.session_id]
        for _ in range(NUM_TURNS):
            session.turn(random_tokens(rng, rng.randint(1, 40)), rng.randint(1, 12))
        entry = cluster.sessions()[session.session_id]
        assert (entry["replica_id"], entry["epoch"]) == (opened["replica_id"], opened["epoch"])
        assert (entry["tokens"], entry["turns"]) == (len(session.history), NUM_TURNS)
        return session


def test_32_sessions_of_10_turns(cluster: ServedCluster, client: httpx.Client) -> None:
    transfers = cluster.metric("kedge_ownership_transfers_total")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        sessions = list(pool.map(lambda seed: run_session(cluster, seed), range(NUM_SESSIONS)))

    owners = Counter(cluster.sessions()[session.session_id]["replica_id"] for session in sessions)
    assert len(owners) == 2, owners
    assert min(owners.values()) >= NUM_SESSIONS // 4, f"placement is lopsided: {owners}"
    assert cluster.metric("kedge_ownership_transfers_total") == transfers
    assert cluster.pages()["leaked"] == 0

    # The turns' answers equal those of one request with the whole history.
    for session in random.Random(1).sample(sessions, 4):
        prompt, expected = session.history[:-1], session.history[-1]
        assert generate_once(client, prompt, 1) == [expected]

    for session in sessions:
        assert client.post("/close_session", json={"session_id": session.session_id}).status_code == 200
    assert not {session.session_id for session in sessions} & set(cluster.sessions())
    assert client.post("/flush_cache").status_code == 200
    books = eventually(lambda: (pages := cluster.pages())["free"] == pages["total"] and pages)
    assert books["leaked"] == 0


def test_concurrent_calls_of_one_http_request(client: httpx.Client) -> None:
    """The calls share Ray Serve's request id. Each must still find a replica."""
    body = {
        "model": "kedge-chat",
        "prompt": "one two",
        "n": 6,
        "max_tokens": 4,
        "temperature": 1.0,
        "seed": 5,
    }
    for _ in range(5):
        reply = client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert len(reply.json()["choices"]) == 6


def test_unpinned_calls_use_both_replicas(cluster: ServedCluster) -> None:
    before = {name: info["generated_tokens"] for name, info in cluster.replicas().items()}
    with cluster.client() as client, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: generate_once(client, [400 + n, 401], 8), range(24)))
    eventually(
        lambda: all(info["generated_tokens"] > before[name] for name, info in cluster.replicas().items()), 5
    )
