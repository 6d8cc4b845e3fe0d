"""The controller's metrics: log, replicas, drains, and where a replica and the ledger disagree."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controllers.cluster import Cluster
from controllers.errors import StoreError
from controllers.records import ReplicaStatus, SessionReport, SessionStatus, TurnRecord
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings
from serving.watch.definitions import DEFINITIONS
from tests.unit.controllers.manual_clock import ManualClock

A, B = (ReplicaStatus(name, 1000, 1000) for name in "ab")


class World:
    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.store = SqliteSessionStore(directory / "log.sqlite3")
        store: Any = self.store
        self.cluster = Cluster(ClusterSettings(), store, self.clock, self.clock)
        for status in (A, B):
            self.cluster.register_replica(status)

    def beat(self, status: ReplicaStatus, report: SessionReport) -> None:
        self.cluster.heartbeat(status, report)

    def measure(self, name: str, **labels: str) -> Any:
        (found,) = (
            each
            for each in self.cluster.measures()
            if each.name == name and labels.items() <= dict(each.labels).items()
        )
        return found

    def orphans(self, replica_id: str) -> dict[str, float]:
        return {
            dict(each.labels)["kind"]: each.value
            for each in self.cluster.measures()
            if each.name == "controller_orphaned_sessions" and dict(each.labels)["replica"] == replica_id
        }


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def held(session_id: str, epoch: int = 1) -> SessionStatus:
    return SessionStatus(session_id, epoch, tokens=0, turns=0, idle_s=0.0, in_turn=False)


def test_no_orphans_while_both_say_the_same(world: World) -> None:
    world.cluster.open_session("s", "", None, None, preferred="a")
    owner = world.cluster.session("s").replica_id
    assert owner == "a"
    world.beat(replace(A, held=1), SessionReport(1, 0, (held("s"),)))
    assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 0}


def test_a_session_that_only_the_ledger_gives_to_a_replica(world: World) -> None:
    world.cluster.open_session("s", "", None, None, preferred="a")
    world.beat(replace(A, held=1), SessionReport(1, 0, (held("s"),)))
    world.beat(replace(A, held=0), SessionReport(2, 1))
    assert world.orphans("a") == {"stale": 0, "missing": 1, "untold": 0}


def test_a_session_that_only_the_replica_has(world: World) -> None:
    world.beat(replace(A, held=1), SessionReport(1, 0))
    assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 1}
    world.beat(replace(A, held=1), SessionReport(2, 1, (held("gone"),)))
    assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 0}, "it has just been told"
    for number in (3, 4):
        world.beat(replace(A, held=1), SessionReport(number, number - 1))
        assert world.orphans("a") == {"stale": 1, "missing": 0, "untold": 0}
    world.beat(replace(A, held=0), SessionReport(5, 4, (), ("gone",)))
    assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 0}


def test_a_replica_that_does_not_say_is_believed(world: World) -> None:
    world.beat(A, SessionReport(1, 0))
    assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 0}


def test_a_session_that_has_moved_is_stale_if_its_former_owner_is_told_and_keeps_it(world: World) -> None:
    world.cluster.open_session("s", "", None, None, preferred="a")
    world.beat(replace(A, held=1), SessionReport(1, 0, (held("s"),)))
    world.cluster.drain_replica("a")
    assert world.cluster.offer_session("s", 1, "a")
    world.beat(replace(A, held=1), SessionReport(2, 1))
    assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 0}
    world.beat(replace(A, held=1), SessionReport(3, 2))
    assert world.orphans("a") == {"stale": 1, "missing": 0, "untold": 0}
    world.beat(replace(A, held=0), SessionReport(4, 3, (), ("s",)))
    assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 0}


def test_sessions_that_end_all_the_time_are_no_orphans(world: World) -> None:
    """The controller knows of each end before the replica's next report does. The alert fired on busy, healthy
    clusters, where some session has always just ended."""
    for number in range(1, 6):
        world.cluster.open_session(f"s{number}", "", None, None, preferred="a")
        world.beat(
            replace(A, held=1), SessionReport(number, number - 1, (held(f"s{number}"),), (f"s{number - 1}",))
        )
        world.cluster.close_session(f"s{number}")
        assert world.cluster._ledger.use_of_replica("a").stale
        assert world.orphans("a") == {"stale": 0, "missing": 0, "untold": 0}


def test_a_session_that_ends_and_is_opened_anew_is_another_one(world: World) -> None:
    """A client that always uses one name: the replica drops each of its sessions, and by then has the next one."""
    for number in range(1, 6):
        world.cluster.open_session("s", "", None, None, preferred="a")
        epoch = world.cluster.session("s").epoch
        world.cluster.close_session("s")
        world.beat(replace(A, held=1), SessionReport(number, number - 1, (held("s", epoch),)))
        assert world.cluster._ledger.use_of_replica("a").stale == {"s": epoch}
        assert world.orphans("a")["stale"] == 0


def test_a_replica_that_is_told_to_report_anew_has_nothing_overdue(world: World) -> None:
    for number in (1, 2):
        world.beat(replace(A, held=1), SessionReport(number, number - 1, (held("gone"),)))
    assert world.orphans("a")["stale"] == 1
    world.cluster.report_unreachable("a", died=True)
    world.cluster.register_replica(A)
    assert world.orphans("a")["stale"] == 0


def test_heartbeats_have_an_age(world: World) -> None:
    world.cluster.tick()
    world.clock.advance(0.1)
    world.cluster.tick()
    world.beat(B, SessionReport(1, 0))
    assert world.measure("controller_heartbeat_age_seconds", replica="a").value == pytest.approx(0.1)
    assert world.measure("controller_heartbeat_age_seconds", replica="b").value == 0


def test_each_state_that_has_a_metric_may_have_replicas(world: World) -> None:
    """There was one for replicas not heard yet, of which nothing is known to count: it was 0 whatever happened."""
    world.cluster.register_replica(replace(A, replica_id="c"))
    world.cluster.report_unreachable("a", died=False)
    world.cluster.drain_replica("b")
    start = "kedge_controller_replicas_"
    names = {name.removeprefix(start) for name in DEFINITIONS if name.startswith(start)} - {"lost"}
    assert {name: world.measure(f"controller_replicas_{name}").value for name in names} == dict.fromkeys(
        names, 1
    )


def test_a_drain_is_timed_once(world: World) -> None:
    world.cluster.drain_replica("a")
    world.cluster.tick()
    world.clock.advance(0.1)
    world.cluster.tick()
    for _ in range(2):
        world.cluster.deregister_replica("a")
    drained = world.measure("controller_drain_seconds")
    assert (sum(drained.counts), drained.value) == (1, pytest.approx(0.1))
    assert world.measure("controller_replicas_lost").value == 0


def test_a_replica_that_dies_is_lost_once(world: World) -> None:
    world.cluster.report_unreachable("a", died=True)
    for _ in range(2):
        world.cluster.tick()
        assert world.measure("controller_replicas_lost").value == 1
    world.cluster.register_replica(A)
    world.cluster.deregister_replica("a")
    world.cluster.tick()
    assert world.measure("controller_replicas_lost").value == 1
    assert sum(world.measure("controller_drain_seconds").counts) == 0


def test_a_loss_counts_although_nobody_reads_the_figures(world: World) -> None:
    """It counted when the figures were read, or idle sessions were ended. A replica that had come back by then was
    never lost."""
    world.cluster.report_unreachable("a", died=True)
    world.cluster.tick()
    world.cluster.register_replica(A)
    assert world.measure("controller_replicas_lost").value == 1


def test_reading_the_figures_changes_none(world: World) -> None:
    world.cluster.report_unreachable("a", died=True)
    first = world.measure("controller_replicas_lost").value
    assert world.measure("controller_replicas_lost").value == first == 0, "the next tick finds it gone"


def test_the_log_is_timed_by_operation(world: World) -> None:
    world.cluster.open_session("s", "", None, None)
    assert sum(world.measure("controller_store_seconds", operation="open").counts) == 1
    assert world.measure("controller_store_errors", operation="open").value == 0


def test_operations_that_fail_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise StoreError("planted")

    monkeypatch.setattr(world.store, "open", fail)
    with pytest.raises(StoreError):
        world.cluster.open_session("s", "", None, None)
    assert world.measure("controller_store_errors", operation="open").value == 1
    assert sum(world.measure("controller_store_seconds", operation="open").counts) == 1
    monkeypatch.setattr(world.store, "append_turns", fail)
    world.cluster.commits._written([])
    assert world.measure("controller_store_errors", operation="commit").value == 1


async def test_groups_of_commits_have_a_size(world: World) -> None:
    groups = world.cluster.commits.in_groups()
    turns = [TurnRecord(f"s{number}", 1, 0, 0, b"", 0) for number in range(3)]
    first = asyncio.create_task(groups.commit(turns[:1]))
    second = asyncio.create_task(groups.commit(turns[1:]))
    await asyncio.sleep(0)
    assert groups.num_waiting == 3
    await asyncio.gather(first, second)
    assert groups.num_waiting == 0
    sizes = world.measure("controller_commit_group_turns")
    assert (sum(sizes.counts), sizes.value) == (1, 3)
