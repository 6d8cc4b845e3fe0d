"""One cluster for the tests of this folder: configs/cluster.yaml as it is shipped, but for ports and state, and then
with the changes that some files need. Few files have one of their own, because of how it is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served_cluster import ROOT, ServedCluster, as_shipped

AT_EVERY_CHANGE = {"test_clients.py", "test_failover.py", "test_pinning.py", "test_ray_tokens.py"}
"""The others take minutes: they are part of `make test-all`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a cluster of their own come first, so that two seldom run at a time; then those that use the shared
    one as it is shipped, so that it is deployed anew only for each file with changes."""
    here, elsewhere = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (here if Path(__file__).parent in item.path.parents else elsewhere).append(item)
    for item in here:
        item.add_marker(pytest.mark.cluster)
        if item.path.name not in AT_EVERY_CHANGE:
            item.add_marker(pytest.mark.slow)
    items[:] = elsewhere + sorted(here, key=_changes)


def _changes(item: pytest.Item) -> int:
    """0: the file does not use the shared cluster, 1: it does, 2: with a fixture `cluster` of its own."""
    assert isinstance(item, pytest.Function)
    if hasattr(item.module, "cluster"):
        return 2
    return int("shared_cluster" in item.fixturenames)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ServedCluster]:
    """Started by the first `use` of it."""
    served = ServedCluster(ROOT / "configs" / "cluster.yaml")
    served.environment["RAY_metrics_report_interval_ms"] = "2000"  # a fifth of Ray's own: tests wait for them
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(as_shipped)
    return shared_cluster


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[httpx.Client]:
    with cluster.client() as http:
        yield http
