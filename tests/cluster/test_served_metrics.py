"""What a real cluster serves: the metrics that are defined, and in Ray's metrics what its boards for LLMs ask for."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config
from served_cluster import ServedCluster, eventually

from serving.watch.definitions import DEFINITIONS
from serving.watch.ray_llm import NOT_TOLD, SERVE_REQUESTS

JOINED = f"ray_{SERVE_REQUESTS}_total"


def with_rays_names(document: dict[str, Any]) -> None:
    (application,) = document["applications"]
    application["args"]["metrics"] = {
        "cluster_name": "east",
        "ray_llm_names": "vllm",
        "audit_interval_s": 1.0,
    }


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(with_rays_names)
    return shared_cluster


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def in_rays_metrics(cluster: ServedCluster) -> dict[str, Metric]:
    """Of all of Ray's agents, as it tells Prometheus where they are."""
    path = next(cluster.directory.rglob("prom_metrics_service_discovery.json"))  # links lead to it, too
    found: dict[str, Metric] = {}
    for target in json.loads(path.read_text())[0]["targets"]:
        for name, family in families(httpx.get(f"http://{target}/metrics", timeout=20.0).text).items():
            found.setdefault(name, family)
            if found[name] is not family:
                found[name].samples += family.samples
    return found


def talk(client: httpx.Client) -> None:
    """Turns at every replica, of every kind."""
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
    """Tenants' figures come with the first look of each replica."""
    return page if set(DEFINITIONS) <= set(page) else None


def test_rays_board_for_vllm_fills(cluster: ServedCluster, client: httpx.Client) -> None:
    """Each series that its panels ask for is there, and is joined by the process to Serve's count of requests."""
    panels = [panel for row in serve_llm_dashboard_config.rows for panel in row.panels]
    asked = _asked(target.expr for panel in panels for target in panel.targets)
    empty = tuple(f"ray_{start}" for start in NOT_TOLD)
    wanted = {name for name in asked if not name.startswith(empty)}

    def joined() -> dict[str, list[dict[str, str]]] | None:
        talk(client)
        series: dict[str, list[dict[str, str]]] = {}
        for family in in_rays_metrics(cluster).values():
            for sample in family.samples:
                series.setdefault(sample.name, []).append(sample.labels)
        if not wanted <= set(series):
            return None
        replicas = {labels["WorkerId"] for labels in series[JOINED] if labels["deployment"] == "LLMReplica"}
        others = [labels for name in wanted - {JOINED} for labels in series[name]]
        # What replicas of the deployment before have told is there for a while.
        return series if all(labels["WorkerId"] in replicas for labels in others) else None

    series = eventually(joined, 90.0, 1.0)
    for name in wanted - {JOINED}:
        assert all(labels["model_name"] for labels in series[name]), name


def _asked(queries: Iterable[str]) -> set[str]:
    return {name for query in queries for name in re.findall(r"\bray_(?:vllm|serve)_\w+", query)}
