"""A full disk under a session log in a file: every change is refused, nothing is lost, and service goes on when there
is room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_world import World
from full_disk import full_disk
from manual_clock import ManualClock
from store_turns import OTHER, SESSION, append_turn, history_of, of_other, turn_of

from controllers.errors import StoreError
from controllers.session_log.sqlite_store import SqliteSessionStore

LONG = list(range(100_000))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sessions.db"


@pytest.fixture
def store(path: Path, clock: ManualClock) -> Iterator[SqliteSessionStore]:
    store = SqliteSessionStore(path, clock=clock)
    yield store
    store.disconnect()


def test_every_change_is_refused_and_nothing_is_lost(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2], idempotency_key="k", result=b"answer"))
    before = store.load("s")
    with full_disk():
        for refused in (
            lambda: append_turn(store, turn_of(1, 2, [3])),
            lambda: store.open(OTHER),
            lambda: store.fork("s", 1, OTHER),
            lambda: store.assign("s", "b", 2),
            lambda: store.touch("s", 9.0),
            lambda: store.close("s"),
            lambda: store.set_deployment("d"),
        ):
            with pytest.raises(StoreError):
                refused()
        assert store.load("s") == before
    append_turn(store, turn_of(1, 2, [3]))
    assert history_of(store) == [1, 2, 3]
    assert [entry.session_id for entry in store.load_all_entries()] == ["s"]


def test_a_group_of_turns_has_room_as_a_whole_or_not_at_all(store: SqliteSessionStore) -> None:
    """SQLite itself says that it is full while the second turn is written, and takes the first one back with it."""
    for session in (SESSION, OTHER):
        store.open(session)
    store._connection.execute("PRAGMA max_page_count = 40")
    turns = [turn_of(0, 0, [7]), of_other(turn_of(0, 0, LONG))]
    with pytest.raises(StoreError, match="is full"):
        store.append_turns(turns)
    assert [history_of(store, name) for name in ("s", "other")] == [[], []]
    append_turn(store, turns[0])  # a small one still has room
    store._connection.execute("PRAGMA max_page_count = 4000")
    assert store.append_turns(turns) == [None, None]
    assert [history_of(store, name) for name in ("s", "other")] == [[7], LONG]


def test_a_start_is_refused_until_there_is_room(path: Path, store: SqliteSessionStore) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1]))
    store.disconnect()
    with full_disk(), pytest.raises(StoreError):
        SqliteSessionStore(path)
    again = SqliteSessionStore(path)
    assert history_of(again) == [1]
    again.disconnect()


def test_a_controller_on_a_full_disk_finds_sessions_and_ends_them_later(
    world: World, clock: ManualClock
) -> None:
    """Owners that are known are still told: their turns begin, and wait for room when they end."""
    cluster = world.cluster
    at = cluster.open_session("s", "", 100.0, None)
    turn = turn_of(0, 0, [1], epoch=at.epoch)
    clock.advance(60.0)
    with full_disk():
        world.beat("a", "b")
        found = cluster.resolve("s", False, "")
        assert (found.replica_id, found.epoch) == (at.replica_id, at.epoch)
        with pytest.raises(StoreError):
            cluster.open_session("other", "", None, None)
        with pytest.raises(StoreError):
            cluster.close_session("s", "")
        assert [type(outcome) for outcome in cluster.commits.commit([turn])] == [StoreError]
        cluster.tick()
        assert (cluster.count(), cluster.session("s").turns) == (1, 0)
    assert cluster.commits.commit([turn]) == [None]
    clock.advance(200.0)
    world.beat("a", "b")
    with full_disk():
        assert cluster.expire_idle() == []
    assert cluster.expire_idle() == ["s"]
