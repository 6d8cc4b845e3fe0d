"""What watchers read from the controller: events after a cursor, and the most recently used sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from manual_clock import ManualClock

from controllers.cluster import Cluster
from controllers.event_log import EventLog
from controllers.recent_keys import RecentKeys
from controllers.records import EVENT_KINDS, ClusterEvent, ForkOrder, ReplicaStatus
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings


def kinds(events: tuple[ClusterEvent, ...]) -> list[tuple[Any, ...]]:
    return [(each.kind, each.session_id, each.replica_id, each.to_replica_id) for each in events]


def status(replica_id: str, **fields: Any) -> ReplicaStatus:
    return ReplicaStatus(replica_id, free_tokens=1000, total_tokens=1000, **fields)


@pytest.fixture
def cluster(tmp_path: Path, clock: ManualClock) -> Cluster:
    store = SqliteSessionStore(tmp_path / "log.sqlite3")
    return Cluster(ClusterSettings(replica_timeout_s=10.0), store, clock, clock)


def test_a_cursor_goes_on_behind_what_was_read() -> None:
    log = EventLog(lambda: 5.0)
    assert log.after(None)[0] == ()
    log.note("opened", "s", "a")
    (first,), cursor = log.after(None)
    assert (first.number, first.at_s, first.kind, first.session_id, first.replica_id) == (
        1,
        5.0,
        "opened",
        "s",
        "a",
    )
    assert log.after(cursor) == ((), cursor)
    log.note("closed", "s", detail="idle timeout")
    (second,), later = log.after(cursor)
    assert (second.number, second.detail) == (2, "idle timeout")
    assert [each.number for each in log.after(None)[0]] == [1, 2]
    assert log.after(later)[0] == ()


def test_the_ring_is_bounded_and_who_is_late_misses_the_oldest() -> None:
    log = EventLog(lambda: 5.0, most=3)
    cursor = log.after(None)[1]
    for number in range(7):
        log.note("opened", str(number))
    assert [each.session_id for each in log.after(cursor)[0]] == ["4", "5", "6"]


def test_a_cursor_of_another_controller_gets_everything() -> None:
    """A restarted controller counts from 1, so readers used to miss its first events."""
    before = EventLog(lambda: 5.0)
    for _ in range(9):
        before.note("opened", "s")
    cursor = before.after(None)[1]
    after = EventLog(lambda: 6.0)
    after.note("moved", "s", "a", "b")
    assert [each.kind for each in after.after(cursor)[0]] == ["moved"]
    assert [each.kind for each in after.after("nonsense")[0]] == ["moved"]


def test_what_was_used_last() -> None:
    recent = RecentKeys(3, "ab")
    for key in "cadc":
        recent.used(key)
    assert list(recent.newest_first()) == ["c", "d", "a"]
    recent.forget("d")
    recent.forget("unknown")
    assert list(recent.newest_first()) == ["c", "a"]


def test_a_takeover_comes_behind_the_loss_of_its_replica(cluster: Cluster) -> None:
    for replica_id in "ab":
        cluster.register_replica(status(replica_id))
    opened = cluster.open_session("s", "t", None, None)
    other = "b" if opened.replica_id == "a" else "a"
    cursor = cluster.watch.view(None, 10).cursor
    cluster.report_unreachable(opened.replica_id, died=True)
    cluster.resolve("s", False, "t")
    view = cluster.watch.view(cursor, 10)
    assert kinds(view.events) == [
        ("replica_down", None, opened.replica_id, None),
        ("taken_over", "t s", opened.replica_id, other),
    ]
    assert view.events[0].detail == "its process has ended"
    assert view.states == {opened.replica_id: "gone", other: "up"}


def test_a_replica_that_falls_silent_is_noticed_by_the_tick(cluster: Cluster, clock: ManualClock) -> None:
    cluster.register_replica(status("a"))
    cursor = cluster.watch.view(None, 10).cursor
    clock.advance(10.5)
    cluster.watch.look()
    assert kinds(cluster.watch.view(cursor, 10).events) == [("replica_down", None, "a", None)]
    cursor = cluster.watch.view(None, 10).cursor
    cluster.register_replica(status("a"))
    assert kinds(cluster.watch.view(cursor, 10).events) == [("replica_up", None, "a", None)]


def test_a_drain_is_told_and_the_sessions_that_leave(cluster: Cluster) -> None:
    cluster.register_replica(status("a"))
    opened = cluster.open_session("s", "", None, None)
    cluster.register_replica(status("b"))
    cursor = cluster.watch.view(None, 10).cursor
    cluster.drain_replica("a")
    assert cluster.offer_session("s", opened.epoch, "a")
    cluster.deregister_replica("a")
    assert kinds(cluster.watch.view(cursor, 10).events) == [
        ("drained", None, "a", None),
        ("moved", "s", "a", "b"),
        ("replica_down", None, "a", None),
    ]


def test_openings_forks_and_ends_are_told(cluster: Cluster) -> None:
    cluster.register_replica(status("a"))
    opened = cluster.open_session("s", "", None, None)
    cluster.fork_session("s", opened.epoch, "a", ForkOrder("child", "k"))
    cluster.close_session("s")
    events = cluster.watch.view(None, 10).events
    assert kinds(events)[1:] == [
        ("opened", "s", "a", None),
        ("opened", "child", "a", None),
        ("closed", "s", None, None),
    ]
    assert events[2].detail == "fork of s, 0 tokens"
    assert {each.kind for each in events} <= set(EVENT_KINDS)


def test_sessions_used_last_come_first(cluster: Cluster, clock: ManualClock) -> None:
    cluster.register_replica(status("a"))
    for name in ("s", "t", "u"):
        clock.advance(1.0)
        cluster.open_session(name, "", None, None)
    clock.advance(1.0)
    cluster.resolve("s", False, "")
    view = cluster.watch.view(None, 2)
    assert (view.sessions, [each.session_id for each in view.recent]) == (3, ["s", "u"])
    cluster.close_session("u")
    assert [each.session_id for each in cluster.watch.view(None, 9).recent] == ["s", "t"]


def test_a_new_controller_knows_from_its_log_what_was_used_last(tmp_path: Path, clock: ManualClock) -> None:
    store = SqliteSessionStore(tmp_path / "log.sqlite3")
    cluster = Cluster(ClusterSettings(), store, clock, clock)
    cluster.register_replica(status("a"))
    for name in ("z", "a", "m"):
        clock.advance(1.0)
        cluster.open_session(name, "", None, None)
    again = Cluster(ClusterSettings(), store, clock, clock)
    assert [each.session_id for each in again.watch.view(None, 9).recent] == ["m", "a", "z"]
