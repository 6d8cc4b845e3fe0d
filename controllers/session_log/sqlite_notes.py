"""The session log's notes of turns in its SQLite file. The column `asked_len` holds a note's `said_len`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import replace

from controllers.records import LedgerEntry, TurnNote, TurnRecord
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.turn_notes import (
    counting,
    decode_note,
    encode_note,
    has_note,
    inherited,
    note_of,
    num_within,
)

FIRST = -(2**63)
"""Before the turns of any session and of its parents."""


class SqliteNotes:
    """The table `notes`. Every method is part of its caller's transaction."""

    def __init__(self, cipher: LogCipher) -> None:
        self._cipher = cipher

    def append(self, db: sqlite3.Connection, entry: LedgerEntry, record: TurnRecord) -> None:
        """Adds the next turn's note. `entry` is the session before the turn."""
        if record.start_len < entry.tokens:
            db.execute(
                "DELETE FROM notes WHERE session_id = ?1 AND turn_index > coalesce((SELECT turn_index FROM notes"
                " WHERE session_id = ?1 AND asked_len <= ?2 ORDER BY turn_index DESC LIMIT 1), ?3)",
                (record.session_id, record.start_len, FIRST),
            )
            self._cut_last(db, record)
        if has_note(record):
            self._insert(db, record.session_id, note_of(record))

    def read(self, db: sqlite3.Connection, entry: LedgerEntry) -> list[TurnNote]:
        rows = db.execute(
            "SELECT turn_index, note FROM notes WHERE session_id = ? ORDER BY turn_index", (entry.session_id,)
        ).fetchall()
        return counting((self._note(entry.session_id, *row) for row in rows), entry.tokens)

    def page(
        self, db: sqlite3.Connection, entry: LedgerEntry, after: int | None, room: int
    ) -> list[TurnNote]:
        """Those of turns after `after` (None: from the first) that fit into `room` bytes, but at least one. Reads no
        others."""
        later = (entry.session_id, FIRST if after is None else after)
        sizes = db.execute(
            "SELECT length(note) FROM notes WHERE session_id = ? AND turn_index > ? ORDER BY turn_index",
            later,
        )
        rows = db.execute(
            "SELECT turn_index, note FROM notes WHERE session_id = ? AND turn_index > ?"
            " ORDER BY turn_index LIMIT ?",
            (*later, num_within((size for (size,) in sizes), room)),
        )
        return counting((self._note(entry.session_id, *row) for row in rows), entry.tokens)

    def ends(self, db: sqlite3.Connection, session_id: str, turns: Iterable[int]) -> dict[int, int]:
        """Where those of the turns end that have a note."""
        found = {}
        for turn_index in turns:
            row = db.execute(
                "SELECT note FROM notes WHERE session_id = ? AND turn_index = ?", (session_id, turn_index)
            ).fetchone()
            if row is not None:
                found[turn_index] = self._note(session_id, turn_index, row[0]).end_len
        return found

    def fork(self, db: sqlite3.Connection, parent: LedgerEntry, child_id: str, length: int) -> None:
        """Gives the child the notes of its parent's turns within its first `length` tokens."""
        self.add(db, child_id, inherited(self.read(db, parent), parent, length))

    def add(self, db: sqlite3.Connection, session_id: str, notes: Iterable[TurnNote]) -> None:
        """Gives these notes to a session that has none of these numbers."""
        for note in notes:
            self._insert(db, session_id, note)

    def forget(self, db: sqlite3.Connection, session_id: str, turn_index: int) -> None:
        row = db.execute(
            "SELECT note FROM notes WHERE session_id = ? AND turn_index = ?", (session_id, turn_index)
        ).fetchone()
        if row is not None:
            note = replace(self._note(session_id, turn_index, row[0]), note=b"")
            self._insert(db, session_id, note)

    def delete(self, db: sqlite3.Connection, session_id: str) -> None:
        db.execute("DELETE FROM notes WHERE session_id = ?", (session_id,))

    def _cut_last(self, db: sqlite3.Connection, record: TurnRecord) -> None:
        """Cuts the last note if `record` continues from within its answer. `record` itself may have no note that would
        show where."""
        row = db.execute(
            "SELECT turn_index, note FROM notes WHERE session_id = ? ORDER BY turn_index DESC LIMIT 1",
            (record.session_id,),
        ).fetchone()
        if row is not None:
            last = self._note(record.session_id, *row)
            if last.end_len > record.start_len:
                self._insert(db, record.session_id, last.cut(record.start_len))

    def _insert(self, db: sqlite3.Connection, session_id: str, note: TurnNote) -> None:
        stored = self._cipher.encrypt(encode_note(note), _place(session_id, note.turn_index))
        db.execute(
            "INSERT OR REPLACE INTO notes (session_id, turn_index, asked_len, note) VALUES (?, ?, ?, ?)",
            (session_id, note.turn_index, note.said_len, stored),
        )

    def _note(self, session_id: str, turn_index: int, stored: bytes) -> TurnNote:
        return decode_note(turn_index, self._cipher.decrypt(stored, _place(session_id, turn_index)))


def _place(session_id: str, turn_index: int) -> str:
    return f"what turn {turn_index} of {session_id} said"
