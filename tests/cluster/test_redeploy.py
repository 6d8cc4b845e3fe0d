"""A redeploy on a running cluster: the new settings take effect and sessions stay. A wrong setting is refused by name,
and the application goes on as before."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from served_cluster import ServedCluster, eventually
from session_client import Conversation

DEPLOY_S = 150.0
NO_FP8 = "it has no fp8 KV; triton has"


def first_settings(document: dict[str, Any]) -> None:
    document["applications"][0]["import_path"] = "null_app:build"
    args = document["applications"][0]["args"]
    args["controller"]["max_sessions"] = 1
    args["replicas"]["count"] = 1


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(first_settings)
    return shared_cluster


def status(cluster: ServedCluster) -> str:
    return str(cluster.application()["status"])


def redeploy(cluster: ServedCluster, section: str, **changes: Any) -> None:
    """Deploys the change. Returns when all replicas have it, or when the deployment has failed."""

    def edit(document: dict[str, Any]) -> None:
        document["applications"][0]["args"].setdefault(section, {}).update(changes)

    before = cluster.application()["last_deployed_time_s"]
    cluster.deploy(edit)
    eventually(lambda: cluster.application()["last_deployed_time_s"] > before, DEPLOY_S)
    eventually(lambda: status(cluster) in ("RUNNING", "DEPLOY_FAILED"), DEPLOY_S)


def second_session(client: httpx.Client) -> httpx.Response:
    return client.post(
        "/open_session", json={"capacity_of_str_len": 1000, "streaming": True, "session_id": "second"}
    )


def test_a_redeploy_takes_effect_without_losing_sessions_and_another_log_is_refused(
    cluster: ServedCluster,
) -> None:
    """Earlier the detached controller kept its first settings and its log, and reported nothing."""
    with cluster.client() as client:
        session = Conversation.open(client, "first")
        session.exact_turn([400, 401, 402])
        assert second_session(client).status_code == 429

        redeploy(cluster, "controller", max_sessions=2)
        assert status(cluster) == "RUNNING"
        assert second_session(client).status_code == 200
        session.turn([403], resumed=True)
        session.exact_turn([404])

        replicas = set(cluster.replicas())
        redeploy(cluster, "controller", state_dir="elsewhere")
        assert status(cluster) == "DEPLOY_FAILED"
        assert "controller.state_dir cannot be changed" in cluster.application()["message"]
        assert set(cluster.replicas()) == replicas, "the application goes on as it was"
        session.exact_turn([405])

        redeploy(cluster, "controller", state_dir=str(cluster.state_dir))
        assert status(cluster) == "RUNNING"
        session.turn([406], resumed=True)
        session.exact_turn([407])
        redeploy(cluster, "sessions", idle_timeout_s=1.0)
        eventually(lambda: not cluster.sessions(), DEPLOY_S)


def test_an_unknown_key_is_refused_by_name(cluster: ServedCluster) -> None:
    replicas = set(cluster.replicas())
    redeploy(cluster, "cache", page_sise=16)
    assert status(cluster) == "DEPLOY_FAILED"
    assert "unknown key 'page_sise'; did you mean 'page_size'?" in cluster.application()["message"]
    assert set(cluster.replicas()) == replicas


def test_a_replica_that_cannot_start_says_why_and_nothing_else(cluster: ServedCluster) -> None:
    """Earlier, when Serve tore down such a replica, the replica complained of its own missing attributes."""
    replicas, told_before = set(cluster.replicas()), cluster.log_text()

    def fp8_on_a_cpu(document: dict[str, Any]) -> None:
        (application,) = document["applications"]
        application["import_path"] = "serving.app:build"
        application["args"]["cache"] = {"kv_dtype": "fp8"}

    cluster.deploy(fp8_on_a_cpu)
    eventually(lambda: cluster.log_text().count(NO_FP8) > told_before.count(NO_FP8) + 2, DEPLOY_S)
    assert "has no attribute" not in cluster.log_text().removeprefix(told_before)
    assert set(cluster.replicas()) == replicas
