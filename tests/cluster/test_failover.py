"""What survives: a killed controller, a killed replica, both; and nothing committed is lost."""

from __future__ import annotations

import random
import threading

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
        # Adopted for good: the next turn finds its KV.
        session.turn(random_tokens(rng, 3))
    for session in sessions:
        session.close()
    eventually(lambda: len(cluster.replicas()) == 2, 90)
    assert cluster.pages()["leaked"] == 0


def test_stream_cut_off_by_a_crash_ends_with_a_typed_error(cluster: ServedCluster) -> None:
    with cluster.client() as client:
        session = Conversation.open(client)
        session.turn([400, 401, 402])
        owner = cluster.sessions()[session.session_id]["replica_id"]
        pid = cluster.replicas()[owner]["pid"]
        lines = session.turn_cut_off(threading.Thread(target=cluster.kill, args=(pid,)).start)
        assert lines[-1] == "data: [DONE]"
        assert "replica_lost" in lines[-2]
        # The turn left no trace; the session goes on elsewhere.
        new = [404, 405]
        session.exact_turn(new, resumed=True)
        session.close()
    eventually(lambda: len(cluster.replicas()) == 2, 90)
