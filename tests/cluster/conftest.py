"""One cluster for all tests of this folder: configs/cluster.yaml as it is shipped, but for ports and state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from served_cluster import ROOT, ServedCluster

AT_EVERY_CHANGE = {"test_clients.py", "test_failover.py", "test_pinning.py"}
"""They share one cluster. The others take minutes: they are part of `make test-all`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            if item.path.name not in AT_EVERY_CHANGE:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def cluster() -> Iterator[ServedCluster]:
    served = ServedCluster(ROOT / "configs" / "cluster.yaml")
    served.start()
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[httpx.Client]:
    with cluster.client() as http:
        yield http
