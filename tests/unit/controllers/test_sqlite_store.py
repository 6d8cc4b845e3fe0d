from __future__ import annotations

import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from manual_clock import ManualClock

from controllers import sqlite_schema
from controllers.errors import IdempotencyConflict, SessionExists, SessionNotFound, StaleEpoch, StoreError
from controllers.records import KEPT_RESULTS, LedgerEntry, SessionRecord, StoredResult, TurnRecord
from controllers.sqlite_store import SqliteSessionStore
from controllers.store import SessionStore
from controllers.tokens import decode_tokens, encode_tokens

SESSION = SessionRecord(
    "s", "tenant", 1, "a", timeout_s=30.0, capacity_tokens=99, created_s=5.0, open_key="o"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "sessions.db"


@pytest.fixture
def store(path: Path, clock: ManualClock) -> Iterator[SqliteSessionStore]:
    store = SqliteSessionStore(path, clock=clock)
    yield store
    store.disconnect()


def _turn(index: int, start_len: int, tokens: list[int], **changes: object) -> TurnRecord:
    record = TurnRecord("s", 1, index, start_len, encode_tokens(tokens), len(tokens) // 2)
    return replace(record, **changes)


def _history(store: SessionStore) -> list[int]:
    return decode_tokens(store.load("s").history)


def _crashed_copy(path: Path, folder: Path) -> Path:
    """The files as a process killed right now would leave them."""
    folder.mkdir()
    for file in path.parent.iterdir():
        shutil.copy(file, folder / file.name)
    return folder / path.name


@contextmanager
def _edit(path: Path) -> Iterator[sqlite3.Connection]:
    """The file itself, behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        yield connection


def test_open_and_load(store: SqliteSessionStore, clock: ManualClock) -> None:
    store.open(SESSION)
    assert store.load("s") == SESSION
    assert store.load_all_entries() == [
        LedgerEntry(
            "s", "tenant", "a", 1, 0, 0, 5.0, clock.now_s, timeout_s=30.0, capacity_tokens=99, open_key="o"
        )
    ]
    with pytest.raises(SessionExists):
        store.open(SESSION)


def test_unknown_sessions(store: SqliteSessionStore) -> None:
    with pytest.raises(SessionNotFound):
        store.load("s")
    with pytest.raises(SessionNotFound):
        store.append_turn(_turn(0, 0, [1]))
    with pytest.raises(SessionNotFound):
        store.assign("s", "b", 2)
    with pytest.raises(SessionNotFound):
        store.touch("s", 1.0)
    assert not store.close("s")
    assert store.load_all_entries() == []


def test_turns_append_and_rewind(store: SqliteSessionStore, clock: ManualClock) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1, 2, 3]))
    store.append_turn(_turn(1, 3, [4, 5]))
    assert _history(store) == [1, 2, 3, 4, 5]
    clock.advance(9)
    store.append_turn(_turn(2, 2, [9]))
    assert _history(store) == [1, 2, 9]
    store.append_turn(_turn(3, 0, [7]))
    assert _history(store) == [7]
    (entry,) = store.load_all_entries()
    assert (entry.tokens, entry.turns, entry.last_used_s) == (1, 4, 1009.0)


def test_rewound_turns_are_deleted(store: SqliteSessionStore, path: Path) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1, 2]))
    for index in range(1, 50):
        store.append_turn(_turn(index, 2, [3, 4, index]))
    assert _history(store) == [1, 2, 3, 4, 49]
    store.disconnect()
    with _edit(path) as connection:
        assert connection.execute("SELECT count(*) FROM turns").fetchone() == (2,)


def test_repeating_the_last_turn_is_fine(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    turn = _turn(0, 0, [1, 2], idempotency_key="k", result=b"r", digest="d")
    store.append_turn(turn)
    store.append_turn(turn)
    assert _history(store) == [1, 2]
    assert store.load("s").results == (StoredResult("k", 0, b"r", "d"),)
    rewind = _turn(1, 1, [5])
    store.append_turn(rewind)
    store.append_turn(rewind)
    assert _history(store) == [1, 5]


@pytest.mark.parametrize(
    "turn",
    [
        _turn(0, 0, [1, 3]),
        _turn(0, 0, [1]),
        _turn(0, 0, [1, 2], idempotency_key="k"),
        _turn(1, 3, [1]),
        _turn(1, -1, [1]),
        _turn(2, 2, [1]),
        _turn(1, 2, [1], epoch=2),
        _turn(1, 2, [1], epoch=0),
        _turn(0, 0, [1, 2], epoch=2),
    ],
)
def test_a_turn_that_does_not_follow_is_stale(store: SqliteSessionStore, turn: TurnRecord) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1, 2]))
    before = store.load("s")
    with pytest.raises(StaleEpoch):
        store.append_turn(turn)
    assert store.load("s") == before


def test_a_new_owner_fences_the_former_one(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1, 2]))
    store.assign("s", "b", 2)
    store.assign("s", "b", 2)
    for replica_id, epoch in (("c", 2), ("b", 4), ("b", 1)):
        with pytest.raises(StaleEpoch):
            store.assign("s", replica_id, epoch)
    with pytest.raises(StaleEpoch):
        store.append_turn(_turn(1, 2, [3]))
    store.append_turn(_turn(1, 2, [4], epoch=2))
    record = store.load("s")
    assert (record.replica_id, record.epoch, decode_tokens(record.history)) == ("b", 2, [1, 2, 4])


def test_only_the_last_results_are_kept(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    for index in range(KEPT_RESULTS + 3):
        store.append_turn(_turn(index, index, [index], idempotency_key=f"k{index}", result=b"%d" % index))
    results = store.load("s").results
    assert [result.turn_index for result in results] == list(range(3, KEPT_RESULTS + 3))
    with pytest.raises(IdempotencyConflict):
        store.append_turn(_turn(KEPT_RESULTS + 3, 0, [1], idempotency_key="k5"))
    assert len(_history(store)) == KEPT_RESULTS + 3
    store.append_turn(_turn(KEPT_RESULTS + 3, 0, [1], idempotency_key="k0"))
    assert _history(store) == [1]


def test_results_outlive_a_rewind(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1], idempotency_key="k", result=b"r"))
    store.append_turn(_turn(1, 0, [2]))
    assert [result.idempotency_key for result in store.load("s").results] == ["k"]


def test_touch(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    store.touch("s", 4321.5)
    assert store.load_all_entries()[0].last_used_s == 4321.5


def test_close_deletes_everything(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1], idempotency_key="k"))
    assert store.close("s")
    assert not store.close("s")
    store.open(SESSION)
    assert store.load("s") == SESSION


def test_epochs_of_closed_sessions_are_remembered(store: SqliteSessionStore, path: Path) -> None:
    assert store.epoch_floor() == 0
    store.open(SESSION)
    store.assign("s", "b", 2)
    assert store.epoch_floor() == 0
    store.close("s")
    store.open(replace(SESSION, epoch=1))
    store.close("s")
    store.disconnect()
    reopened = SqliteSessionStore(path)
    assert reopened.epoch_floor() == 2
    reopened.disconnect()


def test_reopening_after_a_crash(store: SqliteSessionStore, path: Path, tmp_path: Path) -> None:
    store.open(SESSION)
    for index in range(20):
        store.append_turn(_turn(index, index, [index], idempotency_key=f"k{index}"))
    copy = SqliteSessionStore(_crashed_copy(path, tmp_path / "copy"))
    assert copy.load("s") == store.load("s")
    assert copy.load_all_entries() == store.load_all_entries()
    copy.disconnect()


def test_a_killed_process_loses_nothing_committed(path: Path) -> None:
    script = """if True:
        import os, sys
        from controllers.records import SessionRecord, TurnRecord
        from controllers.sqlite_store import SqliteSessionStore
        from controllers.tokens import encode_tokens
        store = SqliteSessionStore(sys.argv[1])
        store.open(SessionRecord("s", "", 1, "a"))
        for index in range(50):
            store.append_turn(TurnRecord("s", 1, index, index, encode_tokens([index]), 1))
        store._connection.execute("BEGIN IMMEDIATE")
        store._connection.execute("DELETE FROM turns")
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -9
    store = SqliteSessionStore(path)
    assert _history(store) == list(range(50))
    store.disconnect()


def test_missing_turns_are_noticed(store: SqliteSessionStore, path: Path) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1, 2]))
    store.append_turn(_turn(1, 2, [3]))
    store.disconnect()
    with _edit(path) as connection:
        connection.execute("DELETE FROM turns WHERE turn_index = 0")
    damaged = SqliteSessionStore(path)
    with pytest.raises(StoreError, match="missing"):
        damaged.load("s")
    damaged.disconnect()


def test_unusable_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "garbage.db").write_bytes(b"no database at all" * 100)
    with _edit(tmp_path / "foreign.db") as connection:
        connection.execute("CREATE TABLE other (x)")
    for name in ("file/sessions.db", "garbage.db", "foreign.db", "."):
        with pytest.raises(StoreError) as caught:
            SqliteSessionStore(tmp_path / name)
        assert caught.value.param == "store_path"
        assert str(tmp_path) in caught.value.message


def test_a_foreign_database_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "foreign.db"
    with _edit(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a session log"):
        SqliteSessionStore(path)
    assert path.read_bytes() == before


def test_another_layout_is_refused(store: SqliteSessionStore, path: Path) -> None:
    store.disconnect()
    with _edit(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="layout 99"):
        SqliteSessionStore(path)


def test_a_second_writer_is_refused(
    store: SqliteSessionStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_schema, "_LOCK_TIMEOUT_S", 0.05)
    with pytest.raises(StoreError, match="locked"):
        SqliteSessionStore(path)
    store.open(SESSION)


def test_a_failing_database_is_a_store_error(store: SqliteSessionStore) -> None:
    store.disconnect()
    with pytest.raises(StoreError):
        store.load("s")
    with pytest.raises(StoreError):
        store.append_turn(_turn(0, 0, [1]))


def test_an_append_does_not_depend_on_the_history(store: SqliteSessionStore) -> None:
    """Writing a million tokens takes many milliseconds; a turn of 16 tokens after them must not."""
    store.open(SESSION)
    store.append_turn(_turn(0, 0, list(range(1_000_000))))
    took_s = []
    for index in range(1, 22):
        turn = _turn(index, 1_000_000 + 16 * (index - 1), [1] * 16)
        started_s = time.process_time()
        store.append_turn(turn)
        took_s.append(time.process_time() - started_s)
    assert statistics.median(took_s) < 2e-3
    assert len(_history(store)) == 1_000_000 + 16 * 21


def test_full_sync(path: Path) -> None:
    store: SessionStore = SqliteSessionStore(path, full_sync=True)
    store.open(SESSION)
    assert store.load("s") == SESSION
    store.disconnect()


def test_tools_are_those_of_the_turn_that_begins_the_history(store: SqliteSessionStore) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1, 2, 3], tools="first"))
    store.append_turn(_turn(1, 3, [4], tools="first"))
    store.append_turn(_turn(2, 4, [5]))
    assert store.load("s").tools == "first"
    store.fork("s", 2, replace(SESSION, session_id="child"))
    assert store.load("child").tools == "first"
    store.append_turn(_turn(3, 0, [6], tools="second"))
    assert store.load("s").tools == "second", "rewound to nothing, it began anew"
    store.append_turn(_turn(4, 0, [6]))
    assert store.load("s").tools is None
    assert store.load("child").tools == "first"


def test_a_log_of_the_first_layout_gains_what_is_new(store: SqliteSessionStore, path: Path) -> None:
    store.open(SESSION)
    store.append_turn(_turn(0, 0, [1, 2, 3]))
    store.disconnect()
    with _edit(path) as connection:
        connection.execute("ALTER TABLE sessions DROP COLUMN tools")
        connection.execute("PRAGMA user_version = 1")
    for _ in range(2):
        again = SqliteSessionStore(path)
        assert (_history(again), again.load("s").tools) == ([1, 2, 3], None)
        again.disconnect()
