"""The answers that a session log in SQLite keeps to be sent again, see kept_answers.py."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from controllers.records import StoredResult, TurnRecord
from controllers.session_log.kept_answers import lost, outdated
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.log_rules import check_key


class SqliteAnswers:
    """The table `results`. Every method is part of its caller's transaction. `ends` says where turns end, by index."""

    def __init__(self, cipher: LogCipher) -> None:
        self._cipher = cipher

    def turns(self, db: sqlite3.Connection, session_id: str) -> list[int]:
        """The turns whose answers are kept, oldest first."""
        rows = db.execute(
            "SELECT turn_index FROM results WHERE session_id = ? ORDER BY turn_index", (session_id,)
        )
        return [index for (index,) in rows]

    def read(
        self, db: sqlite3.Connection, session_id: str, ends: Mapping[int, int]
    ) -> tuple[StoredResult, ...]:
        rows = db.execute(
            "SELECT turn_index, idempotency_key, digest, result FROM results"
            " WHERE session_id = ? ORDER BY turn_index",
            (session_id,),
        )
        return tuple(
            StoredResult(
                key,
                index,
                self._cipher.decrypt(result, _result_place(session_id, index)),
                None
                if digest is None
                else self._cipher.decrypt(digest, _digest_place(session_id, index)).decode(),
                ends.get(index),
            )
            for index, key, digest, result in rows
        )

    def append(self, db: sqlite3.Connection, record: TurnRecord) -> None:
        """Keeps the answer of a turn with a key, and deletes those that are now outdated. Raises
        IdempotencyConflict."""
        session_id, index, key = record.session_id, record.turn_index, record.idempotency_key
        if key is None:
            return
        kept = db.execute(
            "SELECT turn_index, idempotency_key FROM results WHERE session_id = ? ORDER BY turn_index",
            (session_id,),
        ).fetchall()
        keys = [key for _, key in kept]
        check_key(record, keys)
        digest = None if record.digest is None else record.digest.encode()
        db.execute(
            "INSERT INTO results (session_id, turn_index, idempotency_key, digest, result)"
            " VALUES (?, ?, ?, ?, ?)",
            (
                session_id,
                index,
                key,
                None if digest is None else self._cipher.encrypt(digest, _digest_place(session_id, index)),
                self._cipher.encrypt(record.result, _result_place(session_id, index)),
            ),
        )
        for place in outdated([*keys, key]):
            db.execute(
                "DELETE FROM results WHERE session_id = ? AND turn_index = ?", (session_id, kept[place][0])
            )

    def cut(self, db: sqlite3.Connection, session_id: str, length: int, ends: Mapping[int, int]) -> None:
        """Deletes the answers of turns that are no longer whole in the history's first `length` tokens. Their keys
        stay."""
        for index in lost(self.turns(db, session_id), ends, length):
            self.forget(db, session_id, index)

    def forget(self, db: sqlite3.Connection, session_id: str, index: int) -> None:
        """Deletes what the turn answered. Its key stays."""
        db.execute(
            "UPDATE results SET result = ? WHERE session_id = ? AND turn_index = ?",
            (self._cipher.encrypt(b"", _result_place(session_id, index)), session_id, index),
        )

    def delete(self, db: sqlite3.Connection, session_id: str) -> None:
        db.execute("DELETE FROM results WHERE session_id = ?", (session_id,))


def _digest_place(session_id: str, index: int) -> str:
    return f"what turn {index} of {session_id} was asked"


def _result_place(session_id: str, index: int) -> str:
    return f"what turn {index} of {session_id} answered"
