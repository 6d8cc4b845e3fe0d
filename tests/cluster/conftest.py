"""One cluster serves most tests of this folder. It runs configs/cluster.yaml as shipped, except for ports, state and
the CPUs of replicas, and then with the changes that some files need. A few files start a cluster of their own, because
they need a different start."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from served_cluster import ROOT, ServedCluster, as_shipped, free_port

from tests.unit.serving.otlp_collector import Collector, running_collector

AT_EVERY_CHANGE = {"test_clients.py", "test_failover.py", "test_pinning.py", "test_ray_tokens.py"}
"""Files that run at every change. The others take minutes and are part of `make test-all`."""

JUST_AFTER = {
    "test_alerts.py": "test_boards.py",
    "test_haproxy.py": "test_responses_at_two_ingresses.py",
    "test_traces_and_logs.py": "test_durable_conversations_live.py",
}
"""Files that come just after another one, because both have the shared cluster with the same changes."""

LAST, ENDS = "test_termination.py", 3
"""The file that ends the shared cluster, and its place beside the numbers of `_changes`."""

FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a cluster of their own come first, so that two clusters seldom run at a time. Files that use the
    shared cluster as shipped come next, so that it is deployed again only for each file with changes."""
    here, elsewhere = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (here if Path(__file__).parent in item.path.parents else elsewhere).append(item)
    for item in here:
        item.add_marker(pytest.mark.cluster)
        if item.path.name not in AT_EVERY_CHANGE:
            item.add_marker(pytest.mark.slow)
    items[:] = elsewhere + sorted(here, key=_place)


def _place(item: pytest.Item) -> tuple[int, str, str]:
    """By how the file uses the shared cluster, and then by the file."""
    name = item.path.name
    use = ENDS if name == LAST else _changes(item)
    return (use, JUST_AFTER.get(name, name), name if name in JUST_AFTER else "")


def _changes(item: pytest.Item) -> int:
    """0: the file does not use the shared cluster. 1: it does. 2: it does, through a fixture `cluster` of its own."""
    assert isinstance(item, pytest.Function)
    if hasattr(item.module, "cluster"):
        return 2
    return int("shared_cluster" in item.fixturenames)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends `local_ray` before the first test that does not use it. Other tests connect to another Ray."""
    if _uses_local_ray(item) and (nextitem is None or not _uses_local_ray(nextitem)):
        ray.shutdown()


def _uses_local_ray(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "local_ray" in item.fixturenames


@pytest.fixture(scope="module")
def local_ray() -> None:
    """A Ray for actors of the tests, without Kedge. All files that use it share it."""
    if not ray.is_initialized():
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a failed test leaves behind in the shared cluster does not fail the next one."""
    yield
    if request.node.stash.get(FAILED, False) and "shared_cluster" in request.fixturenames:
        request.getfixturevalue("shared_cluster").restore()


def small_replicas(document: dict[str, Any]) -> None:
    """On two CPUs the two replicas of a new deployment load at a time, beside the former two. With the CPUs as shipped,
    one of them waits until a former one has ended. test_planned_changes.py has these."""
    document["applications"][0]["args"]["replicas"]["num_cpus"] = 0.4


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ServedCluster]:
    """The shared cluster. Its first `use` starts it."""
    served = ServedCluster(ROOT / "configs" / "cluster.yaml", always=small_replicas)
    served.environment["RAY_metrics_report_interval_ms"] = "2000"  # a fifth of Ray's default, to wait less
    # Where the tests of HAProxy look. `kedge serve` itself takes a port that is free, and makes a folder.
    served.environment["RAY_SERVE_HAPROXY_STATS_PORT"] = str(free_port())
    served.environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = str(served.directory / "haproxy.cfg")
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Takes the spans of clusters that are traced."""
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def cluster(shared_cluster: ServedCluster) -> ServedCluster:
    shared_cluster.use(as_shipped)
    return shared_cluster


@pytest.fixture
def client(cluster: ServedCluster) -> Iterator[httpx.Client]:
    with cluster.client() as http:
        yield http
