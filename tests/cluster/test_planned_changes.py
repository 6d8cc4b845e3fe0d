"""Replicas are removed and replaced while clients talk. No turn fails, no turn is answered twice, and nobody waits for
a replica to load."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from served_cluster import ServedCluster, eventually
from session_client import Conversation
from talk import talk_through

DRAINED = "kedge_ownership_drained_total"
LENGTH = 1500
"""Tokens of an answer that outlasts the time for which its replica is listed."""


def null_app(document: dict[str, Any]) -> None:
    """On two CPUs the second new replica of an update has to wait for room."""
    document["applications"][0]["import_path"] = "null_app:build"
    document["applications"][0]["args"]["replicas"]["num_cpus"] = 0.5


def fewer_pages(document: dict[str, Any]) -> None:
    cache = document["applications"][0]["args"]["cache"]
    del cache["size_mib"]
    cache["num_pages"] = 1500


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(null_app)
    return shared_cluster


def test_a_rolling_update_fails_no_turn(cluster: ServedCluster) -> None:
    """Earlier, replicas that Serve drained were reported lost, registered again as the emptiest, and attracted
    sessions. A long answer runs to its end. The next turn goes elsewhere with the whole history, as do those of idle
    sessions."""
    before = set(cluster.replicas())
    drained, stale = cluster.metric(DRAINED), cluster.metric("kedge_turns_total", outcome="stale")
    with cluster.client() as client:
        sessions = [Conversation.open(client) for _ in range(4)]
        for session in sessions:
            session.turn([400, 401, 402])

        def update() -> None:
            deploy = threading.Thread(target=cluster.deploy, args=(fewer_pages,))
            sessions[0].told_turn([500], LENGTH, lambda number: deploy.start() if number == 3 else None)
            deploy.join(60.0)
            eventually(lambda: len(cluster.replicas()) == 2 and not before & set(cluster.replicas()), 90)

        talk_through(cluster.client, update)
        owners = cluster.sessions()
        for session in sessions:
            assert owners[session.session_id]["replica_id"] not in before
            session.exact_turn([600], resumed=True)
            session.close()
    assert cluster.metric("kedge_controller_replicas_draining") == 0
    assert cluster.metric(DRAINED) > drained
    assert cluster.metric("kedge_turns_total", outcome="stale") == stale
    eventually(lambda: cluster.pages()["in_flight"] == 0)
    assert cluster.pages()["leaked"] == 0


def test_scaling_down_and_up_fails_no_turn(cluster: ServedCluster) -> None:
    """Scales through Serve's own override, beside `args`. A change of `args` would replace every replica."""
    before = set(cluster.replicas())

    def to(count: int) -> None:
        override = [{"name": "LLMReplica", "num_replicas": count}]
        cluster.deploy(lambda document: document["applications"][0].update(deployments=override))
        eventually(lambda: len(cluster.replicas()) == count, 90)

    talk_through(cluster.client, lambda: [to(1), to(2)])
    assert before & set(cluster.replicas()), "the replica that stays is not replaced"


def test_a_drain_by_hand_empties_one_replica_and_has_it_replaced(cluster: ServedCluster) -> None:
    before = set(cluster.replicas())
    victim = min(before)

    def drain() -> None:
        with cluster.client() as client:
            assert client.post(f"/v1/kedge/replicas/{victim}/drain").status_code == 202
            assert client.post("/v1/kedge/replicas/nobody/drain").status_code == 404
        eventually(lambda: len(cluster.replicas()) == 2 and victim not in cluster.replicas(), 90)

    talk_through(cluster.client, drain)
    assert before - {victim} <= set(cluster.replicas())
