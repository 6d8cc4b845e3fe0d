"""Replicas are taken away and replaced while clients talk: no turn fails, none is said twice, nobody waits for a
load."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served_cluster import ROOT, ServedCluster, eventually
from session_client import Conversation
from talk import talk_through


def null_app(document: dict[str, Any]) -> None:
    document["applications"][0]["import_path"] = "null_app:build"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServedCluster]:
    served = ServedCluster(ROOT / "configs" / "cluster.yaml", null_app)
    served.start()
    try:
        yield served
    finally:
        served.stop()


def test_a_rolling_update_fails_no_turn(cluster: ServedCluster) -> None:
    """Replicas drained by Serve were reported lost, registered again as the emptiest, and attracted sessions."""
    before = set(cluster.replicas())

    def update() -> None:
        cluster.deploy(lambda document: document["applications"][0]["args"]["cache"].update(num_pages=1500))
        eventually(lambda: len(cluster.replicas()) == 2 and not before & set(cluster.replicas()), 90)

    talk_through(cluster.client, update)
    assert cluster.metric("kedge_controller_replicas_draining") == 0
    assert cluster.metric("kedge_ownership_drained_total") > 0
    assert cluster.metric("kedge_turns_total", outcome="stale") == 0
    eventually(lambda: cluster.pages()["in_flight"] == 0)
    assert cluster.pages()["leaked"] == 0


def test_scaling_down_and_up_fails_no_turn(cluster: ServedCluster) -> None:
    """By Serve's own override, beside `args`: a change of `args` would replace every replica."""
    before = set(cluster.replicas())

    def to(count: int) -> None:
        override = [{"name": "LLMReplica", "num_replicas": count}]
        cluster.deploy(lambda document: document["applications"][0].update(deployments=override))
        eventually(lambda: len(cluster.replicas()) == count, 90)

    talk_through(cluster.client, lambda: [to(1), to(2)])
    assert before & set(cluster.replicas()), "the replica that stays is not replaced"


def test_an_answer_of_the_draining_replica_is_told_to_its_end(cluster: ServedCluster) -> None:
    """Turns in flight end where they began; the session's next turn goes elsewhere, with its whole history."""
    with cluster.client() as client:
        sessions = [Conversation.open(client) for _ in range(4)]
        for session in sessions:
            session.turn([400, 401, 402])
        owners = {name: entry["replica_id"] for name, entry in cluster.sessions().items()}
        old = set(cluster.replicas())
        update = threading.Thread(
            target=cluster.deploy,
            args=(lambda document: document["applications"][0]["args"]["cache"].update(num_pages=1400),),
        )
        began: list[Any] = []

        def start_update(number: int) -> None:
            if number == 3:
                update.start()
                began.append(number)

        with httpx.Client(base_url=cluster.url, timeout=120.0) as other:
            streamed = Conversation(other, sessions[0].session_id, sessions[0].history)
            streamed.told_turn([500], 1500, start_update)
            assert began
        update.join(200.0)
        eventually(lambda: not old & set(cluster.replicas()), 90)
        for session in sessions:
            session.exact_turn([600], resumed=True)
            assert cluster.sessions()[session.session_id]["replica_id"] != owners[session.session_id]
            session.close()


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
