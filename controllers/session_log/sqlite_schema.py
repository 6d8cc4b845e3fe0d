"""The session log's SQLite file: how it is opened and recognized, and its layout."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

from controllers.errors import StoreError

_APPLICATION_ID = int.from_bytes(b"KEDG", "big")
_SCHEMA_VERSION = 6
_READABLE = (1, 2, 3, 4, 5, _SCHEMA_VERSION)
"""Opening a file of an older layout brings it to the newest one."""
_LOCK_TIMEOUT_S = 20.0
"""How long a restarted controller waits for its former process to end. If it gives up, it stays down."""

_IN_MEMORY = ":memory:"

_TABLES = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    replica_id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    timeout_s REAL,
    capacity_tokens INTEGER,
    created_s REAL NOT NULL,
    last_used_s REAL NOT NULL,
    open_key TEXT,
    tools TEXT,
    model TEXT,
    closes_after TEXT,
    last_turn BLOB,
    base INTEGER,
    base_len INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
    session_id TEXT NOT NULL,
    turn_index INTEGER NOT NULL,
    start_len INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    PRIMARY KEY (session_id, turn_index)
);
CREATE TABLE IF NOT EXISTS segments (
    segment INTEGER PRIMARY KEY,
    base INTEGER,
    base_len INTEGER NOT NULL,
    end_len INTEGER NOT NULL,
    tokens BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS sessions_of_base ON sessions (base, base_len) WHERE base IS NOT NULL;
CREATE INDEX IF NOT EXISTS segments_of_base ON segments (base, base_len) WHERE base IS NOT NULL;
CREATE TABLE IF NOT EXISTS results (
    session_id TEXT NOT NULL,
    turn_index INTEGER NOT NULL,
    idempotency_key TEXT NOT NULL,
    digest BLOB,
    result BLOB NOT NULL,
    PRIMARY KEY (session_id, turn_index)
);
CREATE TABLE IF NOT EXISTS notes (
    session_id TEXT NOT NULL,
    turn_index INTEGER NOT NULL,
    asked_len INTEGER NOT NULL,
    note BLOB NOT NULL,
    PRIMARY KEY (session_id, turn_index)
);
CREATE TABLE IF NOT EXISTS epoch_floor (
    single_row INTEGER PRIMARY KEY CHECK (single_row = 1),
    epoch INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS deployment (
    single_row INTEGER PRIMARY KEY CHECK (single_row = 1),
    text TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS link_secret (
    single_row INTEGER PRIMARY KEY CHECK (single_row = 1),
    cluster TEXT NOT NULL,
    secret BLOB NOT NULL
);
PRAGMA application_id = {application_id};
PRAGMA user_version = {version};
COMMIT;
"""


_FROM_LAYOUT_1 = """
BEGIN IMMEDIATE;
ALTER TABLE sessions ADD COLUMN tools TEXT;
PRAGMA user_version = 2;
COMMIT;
"""

_FROM_LAYOUT_2 = """
BEGIN IMMEDIATE;
ALTER TABLE sessions ADD COLUMN model TEXT;
PRAGMA user_version = 3;
COMMIT;
"""

_FROM_LAYOUT_3 = """
BEGIN IMMEDIATE;
ALTER TABLE sessions ADD COLUMN closes_after TEXT;
PRAGMA user_version = 4;
COMMIT;
"""

_FROM_LAYOUT_4 = """
BEGIN IMMEDIATE;
ALTER TABLE sessions ADD COLUMN last_turn BLOB;
ALTER TABLE sessions ADD COLUMN base INTEGER;
ALTER TABLE sessions ADD COLUMN base_len INTEGER NOT NULL DEFAULT 0;
UPDATE sessions SET last_turn = CAST(last.identity AS BLOB) FROM (
    SELECT session_id, turn_index,
        json_array(start_len, length(tokens) / 4, input_len, idempotency_key, digest) AS identity
    FROM turns
) AS last WHERE last.session_id = sessions.session_id AND last.turn_index = sessions.turns - 1;
UPDATE results SET digest = CAST(digest AS BLOB);
ALTER TABLE turns DROP COLUMN input_len;
ALTER TABLE turns DROP COLUMN idempotency_key;
ALTER TABLE turns DROP COLUMN digest;
PRAGMA user_version = 5;
COMMIT;
"""


_UNDER_THEIR_KEYS = """
BEGIN IMMEDIATE;
CREATE TEMP TABLE renamed AS SELECT session_id AS former, tenant || ' ' || session_id AS key FROM sessions
    WHERE tenant != '' AND instr(session_id, ' ') = 0;
UPDATE turns SET session_id = key FROM renamed WHERE session_id = former;
UPDATE results SET session_id = key FROM renamed WHERE session_id = former;
UPDATE sessions SET session_id = key FROM renamed WHERE session_id = former;
DROP TABLE renamed;
COMMIT;
"""
"""Earlier versions stored a tenant's session under the client's id. They can still read sessions without a tenant."""


def open_session_log(path: Path, *, full_sync: bool) -> sqlite3.Connection:
    """Opens the log for one exclusive writer, creating file and folders as needed. The file becomes readable only by
    its user, also if it existed before, since it has what was said.

    The file has a write-ahead log. With `synchronous=NORMAL` every commit survives the death of the process, but a loss
    of power may lose the last ones. With `full_sync` these survive too. The exclusive lock ends with the process.

    Raises StoreError if the path cannot be written, is not a session log, is damaged, or is in use elsewhere.
    """
    connection: sqlite3.Connection | None = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(path)
        # The owner serializes calls but may make them from another thread than the one that opened the log.
        connection = sqlite3.connect(
            path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA secure_delete = ON")  # the default only in some builds, such as Debian's
        layout = _layout(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {'FULL' if full_sync else 'NORMAL'}")
        if layout == 1:
            connection.executescript(_FROM_LAYOUT_1)
        if layout <= 2:
            connection.executescript(_FROM_LAYOUT_2)
        if layout <= 3:
            connection.executescript(_FROM_LAYOUT_3)
        if layout <= 4:
            connection.executescript(_FROM_LAYOUT_4)
        # Writing takes the lock, so that a second writer is refused here and not at its first commit.
        connection.executescript(_TABLES.format(application_id=_APPLICATION_ID, version=_SCHEMA_VERSION))
        connection.executescript(_UNDER_THEIR_KEYS)
    except (sqlite3.Error, OSError) as exc:
        if connection is not None:
            connection.close()
        raise StoreError(f"cannot open session log {path}: {exc}", "store_path") from exc
    except StoreError:
        if connection is not None:
            connection.close()
        raise
    return connection


def _make_private(path: Path) -> None:
    """Makes the file readable only by its user. SQLite gives the files that it creates beside it the same mode. Raises
    OSError for a file of another user."""
    if str(path) == _IN_MEMORY:
        return
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            os.fchmod(file.fileno(), 0o600)


def _layout(connection: sqlite3.Connection, path: Path) -> int:
    """The file's layout. An empty file counts as the newest layout. Only reads, so a file of another kind stays as it
    is. Raises StoreError for such a file and for an unknown layout."""
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return _SCHEMA_VERSION
    application_id = connection.execute("PRAGMA application_id").fetchone()[0]
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if application_id != _APPLICATION_ID:
        raise StoreError(f"{path} is a database, but not a session log", "store_path")
    if version not in _READABLE:
        raise StoreError(
            f"{path} has layout {version}; this version of Kedge reads layouts up to {_SCHEMA_VERSION}",
            "store_path",
        )
    return version
