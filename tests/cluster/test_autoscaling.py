"""The number of replicas follows the load: clients bring a second one, their absence removes it, and no turn fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from null_app import PACE
from served_cluster import ServedCluster, eventually
from session_client import Conversation
from talk import talk_through

AUTOSCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_turns_in_flight": 2,
    "look_back_s": 11,
    "upscale_delay_s": 1,
    "downscale_delay_s": 3,
}
STEP_S = 0.03
"""Slow enough that turns spend most of their time in the engine, even on a busy machine."""
DRAINED = "kedge_ownership_drained_total"
SCALED_S = 120.0


def autoscaled(document: dict[str, Any]) -> None:
    (application,) = document["applications"]
    application["import_path"] = "null_app:build"
    del application["args"]["replicas"]["count"]
    application["args"]["replicas"]["autoscaling"] = AUTOSCALING


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> Iterator[ServedCluster]:
    pace = shared_cluster.state_dir / PACE
    pace.parent.mkdir(exist_ok=True)
    pace.write_text(str(STEP_S))
    shared_cluster.use(autoscaled)
    yield shared_cluster
    pace.unlink()


def until(cluster: ServedCluster, count: int) -> set[str]:
    """The replicas, once there are `count` of them."""
    began_s = time.monotonic()
    eventually(lambda: len(cluster.replicas()) == count, SCALED_S)
    logging.getLogger(__name__).info("%d after %.0f s", count, time.monotonic() - began_s)
    return set(cluster.replicas())


def owners(cluster: ServedCluster, sessions: list[Conversation]) -> set[str]:
    entries = cluster.sessions()
    return {entries[session.session_id]["replica_id"] for session in sessions}


def deployed(cluster: ServedCluster) -> dict[str, Any] | None:
    """What Serve reports about the replicas' deployment, once the application runs again."""
    application = cluster.application()
    return application["deployments"].get("LLMReplica") if application["status"] == "RUNNING" else None


def override(cluster: ServedCluster, **options: Any) -> None:
    """Sets Serve's own options of the deployment, beside `args`. Without options, removes them."""
    deployments = [{"name": "LLMReplica", **options}] if options else []
    cluster.deploy(lambda document: document["applications"][0].update(deployments=deployments))


def test_load_brings_a_replica_and_its_absence_takes_it_away(cluster: ServedCluster) -> None:
    """Sessions spread to the new replica. The replica that goes hands its sessions over."""
    until(cluster, 1)
    drained, stale = cluster.metric(DRAINED), cluster.metric("kedge_turns_total", outcome="stale")
    talk_through(cluster.client, lambda: until(cluster, 2))
    with cluster.client() as client:
        sessions = [Conversation.open(client) for _ in range(6)]
        for session in sessions:
            session.turn([400, 401, 402])
        assert owners(cluster, sessions) == set(cluster.replicas()), "both have sessions"
        talk_through(cluster.client, lambda: until(cluster, 1), num_clients=1)
        for session in sessions:
            session.exact_turn([600], resumed=True)
        assert owners(cluster, sessions) == set(cluster.replicas())
        for session in sessions:
            session.close()
    assert cluster.metric(DRAINED) > drained
    assert cluster.metric("kedge_turns_total", outcome="stale") == stale
    eventually(lambda: cluster.pages()["in_flight"] == 0)
    assert cluster.pages()["leaked"] == 0


def test_beside_args_a_number_is_taken_in_place_of_autoscaling_only(cluster: ServedCluster) -> None:
    """Checks what docs/operations/changes.md says about changes that replace no replica."""
    first = until(cluster, 1)
    override(cluster, num_replicas=2)
    assert eventually(lambda: deployed(cluster), SCALED_S)["target_num_replicas"] == 1
    override(cluster, num_replicas=2, autoscaling_config=None)
    assert first < until(cluster, 2)
