"""A redeploy on a running cluster: what the file says counts, sessions stay, and another log is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served_cluster import ROOT, ServedCluster, eventually
from session_client import Conversation

DEPLOY_S = 150.0


def first_settings(document: dict[str, Any]) -> None:
    document["applications"][0]["import_path"] = "null_app:build"
    args = document["applications"][0]["args"]
    args["controller"]["max_sessions"] = 1
    args["replicas"]["count"] = 1


@pytest.fixture
def served() -> Iterator[ServedCluster]:
    served = ServedCluster(ROOT / "configs" / "cluster.yaml", first_settings)
    served.start()
    try:
        yield served
    finally:
        served.stop()


def status(served: ServedCluster) -> str:
    return str(served.application()["status"])


def redeploy(served: ServedCluster, section: str, **changes: Any) -> None:
    """Until all replicas are those of the changed settings."""

    def edit(document: dict[str, Any]) -> None:
        document["applications"][0]["args"].setdefault(section, {}).update(changes)

    before = served.application()["last_deployed_time_s"]
    served.deploy(edit)
    eventually(lambda: served.application()["last_deployed_time_s"] > before, DEPLOY_S)
    eventually(lambda: status(served) in ("RUNNING", "DEPLOY_FAILED"), DEPLOY_S)


def second_session(client: httpx.Client) -> httpx.Response:
    return client.post("/open_session", json={"capacity_of_str_len": 1000, "session_id": "second"})


def test_a_redeploy_takes_effect_without_losing_sessions_and_another_log_is_refused(
    served: ServedCluster,
) -> None:
    """The detached controller kept its first settings, and whatever log it had, without a word."""
    with served.client() as client:
        session = Conversation.open(client, "first")
        session.exact_turn([400, 401, 402])
        assert second_session(client).status_code == 429

        redeploy(served, "controller", max_sessions=2)
        assert status(served) == "RUNNING"
        assert second_session(client).status_code == 200
        session.turn([403], resumed=True)
        session.exact_turn([404])

        replicas = set(served.replicas())
        redeploy(served, "controller", state_dir="elsewhere")
        assert status(served) == "DEPLOY_FAILED"
        assert "controller.state_dir cannot be changed" in served.application()["message"]
        assert set(served.replicas()) == replicas, "the application goes on as it was"
        session.exact_turn([405])

        redeploy(served, "controller", state_dir=str(served.directory / "state"))
        assert status(served) == "RUNNING"
        session.turn([406], resumed=True)
        session.exact_turn([407])
        redeploy(served, "sessions", idle_timeout_s=1.0)
        eventually(lambda: not served.sessions(), DEPLOY_S)
