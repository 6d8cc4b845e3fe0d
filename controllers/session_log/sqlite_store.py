"""SqliteSessionStore: the session log in one SQLite file. One owner; calls must not overlap.

A turn costs O(new tokens), however long the history is. A rewind deletes the rows of turns that lie wholly past its
start and cuts the row of the turn that it goes back into, so the log has only tokens of histories. A fork shares its
parent's tokens (sqlite_histories.py), and parent and child may end in any order.

Deleted data is overwritten, but stays in the write-ahead log until `purge`.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from controllers.errors import ControllerError, StoreError
from controllers.records import (
    LedgerEntry,
    ModelFingerprint,
    SessionRecord,
    TurnNote,
    TurnRecord,
)
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.log_rules import (
    adds_turn,
    changes_owner,
    check_fork,
    exists,
    identity,
    not_found,
    set_by,
)
from controllers.session_log.sqlite_answers import SqliteAnswers
from controllers.session_log.sqlite_histories import SqliteHistories
from controllers.session_log.sqlite_notes import SqliteNotes
from controllers.session_log.sqlite_schema import open_session_log
from controllers.session_log.store import LogChanges
from controllers.tokens import TOKEN_BYTES

logger = logging.getLogger(__name__)

_ENTRY_FIELDS = (
    "session_id",
    "tenant",
    "replica_id",
    "epoch",
    "tokens",
    "turns",
    "created_s",
    "last_used_s",
    "timeout_s",
    "capacity_tokens",
    "open_key",
    "closes_after",
)
"""The fields of a LedgerEntry that have columns of the same name."""
_ENTRY_COLUMNS = ", ".join(_ENTRY_FIELDS)

_MODELS_AT_ONCE = 16
"""How many models' texts are cached. A cluster's replicas have few models, even during an update."""


class SqliteSessionStore:
    """A SessionStore in the file `path`, for `cluster`. `clock` returns Unix time in seconds.

    Raises StoreError if the file cannot be used. `open_session_log` says what `full_sync` does.
    """

    def __init__(
        self,
        path: str | Path,
        cluster: str = "",
        *,
        clock: Callable[[], float] = time.time,
        full_sync: bool = False,
        cipher: LogCipher | None = None,
    ) -> None:
        self._path = Path(path)
        self._cluster = cluster
        self._clock = clock
        self._cipher = cipher or LogCipher()
        self._histories = SqliteHistories(self._cipher)
        self._notes = SqliteNotes(self._cipher)
        self._answers = SqliteAnswers(self._cipher)
        self._connection = open_session_log(self._path, full_sync=full_sync)
        self._purged = False
        self._model_text = lru_cache(_MODELS_AT_ONCE)(_model_text)

    def open(self, record: SessionRecord, notes: Sequence[TurnNote] = ()) -> SessionRecord:
        assert not record.turns
        with self._transaction() as db:
            added = self._insert_session(db, record, tokens=record.num_tokens)
            if record.history:
                self._histories.begin(db, record.session_id, record.history)
            self._notes.add(db, record.session_id, notes)
            return added

    def fork(self, parent_id: str, length: int, record: SessionRecord) -> LedgerEntry:
        with self._transaction() as db:
            parent = _entry(db, parent_id)
            check_fork(parent.tokens, length)
            tools, model = _tools_and_model(db, parent_id)
            record = replace(record, tools=tools, model=model)
            self._insert_session(db, record, tokens=length)
            self._histories.fork(db, parent, record.session_id, length)
            self._notes.fork(db, parent, record.session_id, length)
            return _entry(db, record.session_id)

    def assign(self, session_id: str, replica_id: str, epoch: int) -> None:
        with self._transaction() as db:
            if not changes_owner(_entry(db, session_id), replica_id, epoch):
                return
            db.execute(
                "UPDATE sessions SET replica_id = ?, epoch = ? WHERE session_id = ?",
                (replica_id, epoch, session_id),
            )

    def append_turns(self, records: Sequence[TurnRecord]) -> list[ControllerError | None]:
        """One transaction for all turns, so one flush of the disk."""
        with self._transaction() as db:
            return [self._outcome(db, record) for record in records]

    def load(self, session_id: str) -> SessionRecord:
        with self._transaction() as db:
            entry = _entry(db, session_id)
            history = self._histories.read(db, entry)
            notes = self._notes.read(db, entry)
            tools, model = _tools_and_model(db, session_id)
            ends = {note.turn_index: note.end_len for note in notes}
            return entry.record(history, self._answers.read(db, session_id, ends), tools, model, notes)

    def notes(self, session_id: str) -> list[TurnNote]:
        with self._transaction() as db:
            return self._notes.read(db, _entry(db, session_id))

    def notes_after(self, session_id: str, turn_index: int | None, room: int) -> list[TurnNote]:
        with self._transaction() as db:
            return self._notes.page(db, _entry(db, session_id), turn_index, room)

    def forget_note(self, session_id: str, turn_index: int) -> None:
        with self._transaction() as db:
            _entry(db, session_id)
            self._notes.forget(db, session_id, turn_index)
            self._answers.forget(db, session_id, turn_index)
            self._purged = False

    def find(self, session_id: str) -> LedgerEntry:
        with self._transaction() as db:
            return _entry(db, session_id)

    def claim(self, session_id: str, replica_id: str) -> LedgerEntry:  # noqa: ARG002
        """Changes nothing: the file has one writer, so each session is already its own."""
        return self.find(session_id)

    def changes(self) -> LogChanges:
        return LogChanges()

    def load_all_entries(self) -> Iterator[LedgerEntry]:
        with self._transaction() as db:
            yield from map(_to_entry, db.execute(f"SELECT {_ENTRY_COLUMNS} FROM sessions"))

    def touch(self, session_id: str, last_used_s: float) -> None:
        with self._transaction() as db:
            touched = db.execute(
                "UPDATE sessions SET last_used_s = ? WHERE session_id = ?", (last_used_s, session_id)
            )
            if touched.rowcount == 0:
                raise not_found(session_id)

    def close(self, session_id: str) -> bool:
        with self._transaction() as db:
            db.execute(
                "INSERT INTO epoch_floor SELECT 1, epoch FROM sessions WHERE session_id = ?"
                " ON CONFLICT DO UPDATE SET epoch = max(epoch, excluded.epoch)",
                (session_id,),
            )
            if not _is_there(db, session_id):
                return False
            self._answers.delete(db, session_id)
            self._notes.delete(db, session_id)
            self._histories.delete(db, session_id)
            db.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))
            self._purged = False
            return True

    def close_after(self, session_id: str, turn_key: str) -> None:
        with self._transaction() as db:
            closing = db.execute(
                "UPDATE sessions SET closes_after = ? WHERE session_id = ?", (turn_key, session_id)
            )
            if closing.rowcount == 0:
                raise not_found(session_id)

    def deployment(self) -> str | None:
        with self._transaction() as db:
            row = db.execute("SELECT text FROM deployment").fetchone()
        return None if row is None else str(row[0])

    def set_deployment(self, text: str) -> None:
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO deployment VALUES (1, ?)", (text,))

    def link_secret(self, new: bytes) -> bytes:
        """The file keeps the secret of the cluster that used it last."""
        place = f"the link secret of {self._cluster}"
        with self._transaction() as db:
            found = db.execute(
                "SELECT secret FROM link_secret WHERE cluster = ?", (self._cluster,)
            ).fetchone()
            secret = new if found is None else self._cipher.decrypt(found[0], place)
            stored = self._cipher.encrypt(secret, place)
            db.execute("INSERT OR REPLACE INTO link_secret VALUES (1, ?, ?)", (self._cluster, stored))
            self._purged = False
        return secret

    def purge(self) -> None:
        if self._purged:
            return
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as exc:
            raise self._error(exc) from exc
        self._purged = True

    def disconnect(self) -> None:
        self._connection.close()

    def _outcome(self, db: sqlite3.Connection, record: TurnRecord) -> ControllerError | None:
        """Appends a turn and returns its outcome. If it cannot be added, only this turn is rolled back. Raises errors
        that concern all turns, such as a full disk."""
        db.execute("SAVEPOINT turn")
        try:
            self._append(db, record)
        except sqlite3.OperationalError:
            raise
        except Exception as error:
            db.execute("ROLLBACK TO turn")
            if isinstance(error, ControllerError):
                return error
            logger.exception("session %s: its turn cannot be written", record.session_id)
            return self._error(error)
        finally:
            if db.in_transaction:
                db.execute("RELEASE turn")
        return None

    def _append(self, db: sqlite3.Connection, record: TurnRecord) -> None:
        assert len(record.tokens) % TOKEN_BYTES == 0
        entry = _entry(db, record.session_id)
        if not adds_turn(entry, record, lambda: self._is_last_turn(db, entry, record)):
            return
        if record.start_len < entry.tokens:
            ends = self._notes.ends(db, record.session_id, self._answers.turns(db, record.session_id))
            self._answers.cut(db, record.session_id, record.start_len, ends)
            self._purged = False
        self._answers.append(db, record)
        self._histories.append(db, entry, record)
        self._notes.append(db, entry, record)
        last_turn = self._cipher.encrypt(json.dumps(identity(record)).encode(), _last_place(entry))
        changes = set_by(record)
        if "model" in changes:
            changes["model"] = self._model_text(record.model)
        columns = "".join(f", {name} = ?" for name in changes)
        db.execute(
            f"UPDATE sessions SET tokens = ?, turns = turns + 1, last_used_s = ?, last_turn = ?{columns}"
            " WHERE session_id = ?",
            (record.end_len, self._clock(), last_turn, *changes.values(), record.session_id),
        )

    def _insert_session(
        self, db: sqlite3.Connection, record: SessionRecord, tokens: int = 0
    ) -> SessionRecord:
        record = replace(record, epoch=max(record.epoch, _epoch_floor(db) + 1))
        added = db.execute(
            f"INSERT OR IGNORE INTO sessions ({_ENTRY_COLUMNS}, tools, model)"
            " VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, NULL, ?, ?)",
            (
                record.session_id,
                record.tenant,
                record.replica_id,
                record.epoch,
                tokens,
                record.created_s,
                self._clock(),
                record.timeout_s,
                record.capacity_tokens,
                record.open_key,
                record.tools,
                self._model_text(record.model),
            ),
        )
        if added.rowcount == 0:
            raise exists(record.session_id)
        return record

    def _is_last_turn(self, db: sqlite3.Connection, entry: LedgerEntry, record: TurnRecord) -> bool:
        """True if the last turn is this record. Results are not compared: they are not part of the history."""
        (stored,) = db.execute(
            "SELECT last_turn FROM sessions WHERE session_id = ?", (entry.session_id,)
        ).fetchone()
        if stored is None or json.loads(self._cipher.decrypt(stored, _last_place(entry))) != identity(record):
            return False
        return self._histories.read(db, entry)[record.start_len * TOKEN_BYTES :] == record.tokens

    def _error(self, exc: Exception) -> StoreError:
        return StoreError("session log: it cannot be read or written", detail=f"{self._path}: {exc}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction: commits at the end of the block, rolls back if it raises."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as exc:
            raise self._error(exc) from exc


def _entry(db: sqlite3.Connection, session_id: str) -> LedgerEntry:
    row = db.execute(f"SELECT {_ENTRY_COLUMNS} FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
    if row is None:
        raise not_found(session_id)
    return _to_entry(row)


def _epoch_floor(db: sqlite3.Connection) -> int:
    return int(db.execute("SELECT coalesce(max(epoch), 0) FROM epoch_floor").fetchone()[0])


def _tools_and_model(db: sqlite3.Connection, session_id: str) -> tuple[str | None, ModelFingerprint | None]:
    tools, text = db.execute(
        "SELECT tools, model FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    return tools, None if text is None else ModelFingerprint(**json.loads(text))


def _model_text(model: ModelFingerprint | None) -> str | None:
    return None if model is None else json.dumps(asdict(model))


def _to_entry(row: tuple[Any, ...]) -> LedgerEntry:
    """The LedgerEntry of a row. Fields that replicas report have no columns and get their initial values."""
    timeout_s, capacity_tokens, open_key, closes_after = row[8:]
    values = (*row[:8], 0, False, None, timeout_s, capacity_tokens, open_key, True, closes_after)
    return LedgerEntry(*values)


def _is_there(db: sqlite3.Connection, session_id: str) -> bool:
    return db.execute("SELECT 1 FROM sessions WHERE session_id = ?", (session_id,)).fetchone() is not None


def _last_place(entry: LedgerEntry) -> str:
    return f"the last turn of {entry.session_id}"
