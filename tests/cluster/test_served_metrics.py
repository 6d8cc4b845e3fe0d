"""What a real cluster serves: the defined metrics, and what Ray's own dashboards show of them."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_prometheus import installed
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray_boards import BoardQuery, RayPrometheus, queries_of
from served_cluster import ServedCluster, eventually
from watched_cluster import clients

from serving.watch.definitions import DEFINITIONS
from serving.watch.ray_llm import NOT_TOLD, LLMNames

NOT_OF_KEDGE = re.compile(r"_grpc_|multiplexed")
"""Queries of Serve's dashboards that have no data with Kedge: it has no gRPC and no multiplexed model."""
AS_IT_COMES = re.compile(r"_gpus_|_gram_|recently_failed_nodes|_scheduling_tasks")
"""Queries that may have no data: on a machine without GPUs, or in a cluster without failures."""
WHOLE_MINUTE_S = 60.0
"""One panel looks only at whole minutes. So queries ask about a time when the next minute has begun."""


def with_rays_names(document: dict[str, Any], names: LLMNames = "vllm") -> None:
    (application,) = document["applications"]
    application["args"]["metrics"] = {
        "cluster_name": "east",
        "ray_llm_names": names,
        "audit_interval_s": 1.0,
    }


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(with_rays_names)
    return shared_cluster


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def talk(client: httpx.Client) -> None:
    """Turns of every kind, at every replica."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    for number in range(8):
        chat = {
            "model": model,
            "messages": [{"role": "user", "content": f"{number}: hello"}],
            "max_tokens": 6,
            "stream": number % 2 == 0,
        }
        named = {"x-session-id": uuid.uuid4().hex}
        for headers in (named, {}, {}):
            client.post("/v1/chat/completions", json=chat, headers=headers).raise_for_status()


def test_the_page_is_what_is_defined(cluster: ServedCluster, client: httpx.Client) -> None:
    talk(client)
    page = eventually(lambda: _whole(families(client.get("/metrics").text)))
    assert set(page) - set(DEFINITIONS) == set()
    for name, family in page.items():
        wanted = {"cluster", "model", *DEFINITIONS[name].labels}
        assert family.type == DEFINITIONS[name].kind.value
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == wanted, sample
            assert sample.labels["cluster"] == "east"
    assert cluster.metric("kedge_audit_findings") == cluster.metric("kedge_orphaned_sessions") == 0
    eventually(lambda: cluster.metric("kedge_controller_orphaned_sessions") == 0)
    assert cluster.metric("kedge_links", state="up") == 2
    assert cluster.metric("kedge_replicas_expected") == cluster.metric("kedge_controller_replicas_live")


def _whole(page: dict[str, Metric]) -> dict[str, Metric] | None:
    """The page once it has every metric. Tenants' figures appear with the first census of each replica's KV."""
    return page if set(DEFINITIONS) <= set(page) else None


@pytest.fixture(scope="module")
def rays_folder(cluster: ServedCluster) -> Path:
    return cluster.directory / "ray" / "session_latest" / "metrics"


@pytest.fixture(scope="module")
def prometheus(rays_folder: Path) -> Iterator[RayPrometheus]:
    if not installed():
        pytest.skip("prometheus is not installed (Debian's package)")
    scraping = RayPrometheus(rays_folder)
    try:
        scraping.start()
        yield scraping
    finally:
        scraping.stop()


def chats(client: httpx.Client, rng: random.Random) -> int:
    """One call with a session, one that is refused, and one that is broken off."""
    chat = {
        "model": "kedge-chat",
        "messages": [{"role": "user", "content": f"number {rng.randrange(10**9)}"}],
        "max_tokens": 8,
    }
    session = {"x-session-id": uuid.uuid4().hex}
    assert client.post("/v1/chat/completions", json=chat | {"max_tokens": "x"}).status_code == 400
    with client.stream(
        "POST", "/v1/chat/completions", json=chat | {"max_tokens": 400, "stream": True}
    ) as reply:
        next(reply.iter_lines())
    return client.post("/v1/chat/completions", json=chat, headers=session).status_code


def fill(cluster: ServedCluster, prometheus: RayPrometheus, expected: list[BoardQuery]) -> None:
    """Waits until each query has had a number, while clients chat. Gauges that are seldom set come and go, because Ray
    shows them for two of its intervals."""
    missing = expected

    def filled() -> bool:
        nonlocal missing
        at_s = time.time() + WHOLE_MINUTE_S
        missing = [each for each in missing if not prometheus.has_numbers(each.expression, at_s)]
        return not missing

    with clients(cluster, 3, chats) as told:
        try:
            eventually(filled, 90.0, 0.5)
        except AssertionError:
            raise AssertionError([each.panel for each in missing], prometheus.targets()) from None
    assert set(told) == {200}


def test_rays_boards_for_serve_fill(
    cluster: ServedCluster, prometheus: RayPrometheus, rays_folder: Path
) -> None:
    """Except queries about what Kedge does not have."""
    asked = [each for board in ("serve", "serve_deployment") for each in queries_of(rays_folder, board)]
    empty = [each for each in asked if NOT_OF_KEDGE.search(each.expression)]
    certain = [each for each in asked if each not in empty and not AS_IT_COMES.search(each.expression)]
    fill(cluster, prometheus, certain)
    assert [each for each in empty if prometheus.query(each.expression)] == []


@pytest.mark.parametrize(("names", "board"), [("vllm", "serve_llm"), ("sglang", "serve_llm_sglang")])
def test_rays_board_for_llms_fills(
    cluster: ServedCluster, prometheus: RayPrometheus, rays_folder: Path, names: LLMNames, board: str
) -> None:
    """Except queries about what Kedge does not report. Serve's requests count turns, so the variables offer the
    replicas."""
    cluster.use(partial(with_rays_names, names=names))
    asked = queries_of(rays_folder, board)
    empty = [each for each in asked if any(f"ray_{start}" in each.expression for start in NOT_TOLD)]
    fill(cluster, prometheus, [each for each in asked if each not in empty])
    assert [each for each in empty if prometheus.query(each.expression)] == []
    uncounted = (
        f"group by (replica) (ray_{names}_prompt_tokens_total)"
        " unless on (replica) ray_serve_deployment_request_counter_total"
    )
    eventually(lambda: not prometheus.query(uncounted))
