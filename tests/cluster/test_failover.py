"""What survives when a controller or replica is killed between turns: nothing committed is lost."""

from __future__ import annotations

import random

import httpx
from served_cluster import ServedCluster, eventually
from session_client import Conversation, random_tokens


def test_killed_controller_forgets_no_ownership(cluster: ServedCluster, client: httpx.Client) -> None:
    rng = random.Random(2)
    sessions = [Conversation.open(client) for _ in range(4)]
    for session in sessions:
        session.turn(random_tokens(rng, 20))
    owners = {name: (s["replica_id"], s["epoch"], s["tokens"]) for name, s in cluster.sessions().items()}
    (pid,) = cluster.pids("ray::ClusterController")
    cluster.kill(pid)
    for session in sessions:
        session.turn(random_tokens(rng, 5))
    after = cluster.sessions()
    for session in sessions:
        entry = after[session.session_id]
        owner, epoch, tokens = owners[session.session_id]
        assert (entry["replica_id"], entry["epoch"]) == (owner, epoch)
        assert entry["tokens"] == tokens + 5 + 8
        session.close()


def test_killed_replica_loses_no_committed_turn(cluster: ServedCluster, client: httpx.Client) -> None:
    rng = random.Random(3)
    sessions = [Conversation.open(client) for _ in range(6)]
    for session in sessions:
        for _ in range(2):
            session.turn(random_tokens(rng, 25))
    victim = cluster.sessions()[sessions[0].session_id]["replica_id"]
    before = cluster.sessions()
    cluster.kill(cluster.replicas()[victim]["pid"])

    for session in sessions:
        moved = before[session.session_id]["replica_id"] == victim
        new = random_tokens(rng, 10)
        session.exact_turn(new, resumed=moved)
        entry = cluster.sessions()[session.session_id]
        assert entry["epoch"] == before[session.session_id]["epoch"] + moved
        assert (entry["replica_id"] == before[session.session_id]["replica_id"]) is not moved
        # The new owner keeps the session: the next turn finds its KV there.
        session.turn(random_tokens(rng, 3))
    for session in sessions:
        session.close()
    eventually(lambda: len(cluster.replicas()) == 2, 90)
    assert cluster.pages()["leaked"] == 0
