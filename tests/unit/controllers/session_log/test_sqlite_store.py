"""What is special about a session log in an SQLite file."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from manual_clock import ManualClock
from store_turns import SESSION, append_turn, history_of, turn_of

from controllers.errors import StoreError
from controllers.session_log import sqlite_schema
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_log.store import SessionStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "sessions.db"


@pytest.fixture
def store(path: Path, clock: ManualClock) -> Iterator[SqliteSessionStore]:
    store = SqliteSessionStore(path, clock=clock)
    yield store
    store.disconnect()


def _crashed_copy(path: Path, folder: Path) -> Path:
    """Copies the files as a process would leave them that is killed right now."""
    folder.mkdir()
    for file in path.parent.iterdir():
        shutil.copy(file, folder / file.name)
    return folder / path.name


@contextmanager
def _edit(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens the file itself, past the store."""
    with closing(sqlite3.connect(path)) as connection, connection:
        yield connection


def test_nobody_else_can_read_what_was_said(path: Path) -> None:
    """The file used to be made with mode 0644, its folder with 0755."""
    former = os.umask(0o022)
    try:
        for _ in range(2):
            with closing(SqliteSessionStore(path)._connection):
                found = {
                    file: stat.S_IMODE(file.stat().st_mode) for file in (path.parent, *path.parent.iterdir())
                }
            assert found.pop(path.parent) == 0o700
            assert len(found) == 2, "the log and its write-ahead log"
            assert set(found.values()) == {0o600}
            path.chmod(0o644)  # as an earlier version left it
    finally:
        os.umask(former)


def test_rewound_turns_are_deleted(store: SqliteSessionStore, path: Path) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    for index in range(1, 50):
        append_turn(store, turn_of(index, 2, [3, 4, index]))
    assert history_of(store) == [1, 2, 3, 4, 49]
    store.disconnect()
    with _edit(path) as connection:
        assert connection.execute("SELECT count(*) FROM turns").fetchone() == (2,)


def test_reopening_after_a_crash(store: SqliteSessionStore, path: Path, tmp_path: Path) -> None:
    store.open(SESSION)
    for index in range(20):
        append_turn(store, turn_of(index, index, [index], idempotency_key=f"k{index}"))
    copy = SqliteSessionStore(_crashed_copy(path, tmp_path / "copy"))
    assert copy.load("s") == store.load("s")
    assert list(copy.load_all_entries()) == list(store.load_all_entries())
    copy.disconnect()


def test_a_killed_process_loses_nothing_committed(path: Path) -> None:
    script = """if True:
        import os, sys
        from controllers.records import SessionRecord, TurnRecord
        from controllers.session_log.sqlite_store import SqliteSessionStore
        from controllers.tokens import encode_tokens
        store = SqliteSessionStore(sys.argv[1])
        store.open(SessionRecord("s", "", 1, "a"))
        for index in range(50):
            store.append_turns([TurnRecord("s", 1, index, index, encode_tokens([index]), 1)])
        store._connection.execute("BEGIN IMMEDIATE")
        store._connection.execute("DELETE FROM turns")
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -9
    store = SqliteSessionStore(path)
    assert history_of(store) == list(range(50))
    store.disconnect()


def test_missing_turns_are_noticed(store: SqliteSessionStore, path: Path) -> None:
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, [1, 2]))
    append_turn(store, turn_of(1, 2, [3]))
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
    for name in ("file/sessions.db", "garbage.db", "."):
        with pytest.raises(StoreError) as caught:
            SqliteSessionStore(tmp_path / name)
        assert caught.value.param == "store_path"
        assert str(tmp_path) in caught.value.message


def test_a_foreign_database_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "foreign.db"
    with _edit(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a session log") as caught:
        SqliteSessionStore(path)
    assert caught.value.param == "store_path"
    assert path.read_bytes() == before


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
        append_turn(store, turn_of(0, 0, [1]))


def test_an_append_does_not_depend_on_the_history(store: SqliteSessionStore) -> None:
    """Writing a million tokens takes many milliseconds. A turn of 16 tokens after them must not."""
    store.open(SESSION)
    append_turn(store, turn_of(0, 0, list(range(1_000_000))))
    took_s = []
    for index in range(1, 22):
        turn = turn_of(index, 1_000_000 + 16 * (index - 1), [1] * 16)
        started_s = time.process_time()
        append_turn(store, turn)
        took_s.append(time.process_time() - started_s)
    assert statistics.median(took_s) < 2e-3
    assert len(history_of(store)) == 1_000_000 + 16 * 21


def test_full_sync(path: Path) -> None:
    store: SessionStore = SqliteSessionStore(path, full_sync=True)
    store.open(SESSION)
    assert store.load("s") == SESSION
    store.disconnect()
