"""Real clients against a real `kedge serve` with two replicas. The model has random weights and makes no sensible calls
of its own. These tests are part of `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.long_model import make_long_model
from tests.cluster.served_cluster import ROOT, ServedCluster

ALIASES = ["claude-sonnet-4-5", "claude-haiku-4-5", "gpt-5-codex", "kedge", "kedge-chat"]

STOP = pytest.StashKey[Callable[[], None]]()
"""Stops the cluster, if it runs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The cluster ends with this folder's last test, not with the session, which goes on for long."""
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        item.config.stash.get(STOP, lambda: None)()


@pytest.fixture(scope="session")
def kedge(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServedCluster]:
    directory = tmp_path_factory.mktemp("long")
    make_long_model(directory)

    def long_model(document: dict[str, Any]) -> None:
        args = document["applications"][0]["args"]
        args["model"] |= {"path": str(directory), "load_format": "dummy", "aliases": ALIASES}

    served = ServedCluster(ROOT / "configs" / "cluster.yaml", long_model)
    request.config.stash[STOP] = served.stop
    try:
        served.start()
        yield served
    finally:
        served.stop()
