"""Adapters on a cluster: their sessions outlive replicas, and one more is deployed while turns go on."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served_cluster import ROOT, ServedCluster, eventually
from session_client import Conversation

from engine.models.config import parse_spec, read_config
from tests.unit.engine.models.adapter_files import write_adapter

MODEL = ROOT / "assets" / "models" / "kedge-chat"
DEPLOY_S = 150.0
LONGEST = 3000
"""Tokens of a history: the model's context has no room for many more."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory, spec = tmp_path_factory.mktemp("adapters"), parse_spec(read_config(MODEL))
    return {
        name: write_adapter(directory / name, spec, 8, seed=seed).path
        for seed, name in enumerate(("first", "second"))
    }


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster, adapters: dict[str, str]) -> ServedCluster:
    """With the first of the adapters."""

    def edit(document: dict[str, Any]) -> None:
        document["applications"][0]["args"]["model"]["adapters"] = {"first": adapters["first"]}

    shared_cluster.use(edit)
    return shared_cluster


def adapted(client: httpx.Client, session_id: str, adapter: str | None) -> Conversation:
    conversation = Conversation.open(client, session_id)
    conversation.adapter = adapter
    return conversation


def test_a_session_with_an_adapter_outlives_its_replica(cluster: ServedCluster, client: httpx.Client) -> None:
    plain, first = (adapted(client, str(adapter), adapter) for adapter in (None, "first"))
    for conversation in (plain, first):
        conversation.exact_turn([400, 401, 402])
        conversation.exact_turn([403])
    assert plain.history != first.history, "the adapter changes nothing"
    owner = cluster.sessions()["first"]["replica_id"]
    cluster.kill(cluster.replicas()[owner]["pid"])
    for conversation in (plain, first):
        conversation.exact_turn([404], resumed=True)
        conversation.exact_turn([405])
    assert cluster.sessions()["first"]["replica_id"] != owner
    cluster.restore()


def test_an_adapter_is_added_while_turns_go_on(
    cluster: ServedCluster, client: httpx.Client, adapters: dict[str, str]
) -> None:
    """No turn with the other adapter fails meanwhile."""
    talk = adapted(client, "talk", "first")

    def add_second(document: dict[str, Any]) -> None:
        document["applications"][0]["args"]["model"]["adapters"] = adapters

    def is_there() -> bool:
        """Until all processes have the new settings, one may know the adapter while another does not."""
        body = {"model": "second", "prompt": [400], "max_tokens": 1}
        status = client.post("/v1/completions", json=body).status_code
        assert status in (200, 404, 503)
        return status == 200

    def deployed() -> bool:
        application = cluster.application()
        return application["last_deployed_time_s"] > before and application["status"] == "RUNNING"

    assert not is_there()
    before, until_s = cluster.application()["last_deployed_time_s"], time.monotonic() + DEPLOY_S
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(cluster.deploy, add_second)
        while not (accepted.done() and deployed() and is_there()):
            assert time.monotonic() < until_s
            if len(talk.history) < LONGEST:
                talk.turn([400], resumed=True)
        accepted.result()
    eventually(cluster._all_replicas_up, DEPLOY_S)
    for name in adapters:
        adapted(client, f"new-{name}", name).exact_turn([400, 401])
    talk.exact_turn([402], resumed=True)
    listed = [card["id"] for card in client.get("/v1/models").json()["data"]]
    assert listed == ["kedge-chat", *adapters]
