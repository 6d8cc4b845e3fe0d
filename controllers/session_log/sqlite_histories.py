"""Histories in the session log's SQLite file: each session's turns, after the tokens that it shares with others.

Shared tokens are in *segments*: tokens that were a session's own until it was forked. A segment may continue another
one. The segments that a history begins with are its line. A session, or a segment, uses the first `base_len` tokens of
the line that ends with the segment `base`.

Invariant: a segment is as long as its longest use, so no tokens stay that are in no session's history. A segment
without users is deleted.
"""

from __future__ import annotations

import sqlite3

from controllers.errors import StoreError
from controllers.records import LedgerEntry, TurnRecord
from controllers.session_keys import named
from controllers.session_log.log_cipher import LogCipher
from controllers.tokens import TOKEN_BYTES, count_tokens

Base = tuple[int | None, int]
"""The segment that a line ends with (None: there is none), and how many of the line's tokens are used."""


class SqliteHistories:
    """The tables `turns` and `segments`, and the columns `base` and `base_len` of `sessions`. Every method is part of
    its caller's transaction."""

    def __init__(self, cipher: LogCipher) -> None:
        self._cipher = cipher

    def read(self, db: sqlite3.Connection, entry: LedgerEntry) -> bytes:
        """The session's tokens. Raises StoreError if some are missing."""
        base = _base(db, entry.session_id)
        return self._line(db, base) + self._own(db, entry, base[1])

    def append(self, db: sqlite3.Connection, entry: LedgerEntry, record: TurnRecord) -> None:
        """Adds the session's next turn. O(new tokens), unless it rewinds into shared tokens."""
        tokens = self._cipher.encrypt(record.tokens, _place(record.session_id, record.turn_index))
        if record.start_len < entry.tokens:
            self._rewind(db, record.session_id, record.start_len)
        db.execute(
            "INSERT INTO turns (session_id, turn_index, start_len, tokens) VALUES (?, ?, ?, ?)",
            (record.session_id, record.turn_index, record.start_len, tokens),
        )

    def fork(self, db: sqlite3.Connection, parent: LedgerEntry, child_id: str, length: int) -> None:
        """Makes the child, which has no tokens yet, begin with `length` tokens of its parent. O(tokens that no other
        session shares yet), so later forks at this place cost nothing."""
        base, base_len = _base(db, parent.session_id)
        if length > base_len:
            base = self._share(db, parent, (base, base_len))
        _set_base(db, child_id, _cut(db, (base, length)))

    def begin(self, db: sqlite3.Connection, session_id: str, tokens: bytes) -> None:
        """Makes the session, which has no tokens yet, begin with these."""
        _set_base(db, session_id, (self._added(db, (None, 0), tokens), count_tokens(tokens)))

    def delete(self, db: sqlite3.Connection, session_id: str) -> None:
        """Deletes the session's history. The caller deletes the session itself."""
        base, _ = _base(db, session_id)
        db.execute("DELETE FROM turns WHERE session_id = ?", (session_id,))
        _set_base(db, session_id, (None, 0))
        self._release(db, base)

    def _rewind(self, db: sqlite3.Connection, session_id: str, start_len: int) -> None:
        """Deletes the session's tokens after the first `start_len`. Tokens that others share stay until the last of
        these is gone."""
        db.execute(
            "DELETE FROM turns WHERE session_id = ?1 AND turn_index > coalesce((SELECT turn_index FROM turns"
            " WHERE session_id = ?1 AND start_len < ?2 ORDER BY turn_index DESC LIMIT 1), -1)",
            (session_id, start_len),
        )
        self._cut_last_turn(db, session_id, start_len)
        base, base_len = _base(db, session_id)
        if start_len < base_len:
            _set_base(db, session_id, _cut(db, (base, start_len)))
            self._release(db, base)

    def _cut_last_turn(self, db: sqlite3.Connection, session_id: str, length: int) -> None:
        """Makes the session's last turn, which begins within the first `length` tokens, end there."""
        row = db.execute(
            "SELECT turn_index, start_len, tokens FROM turns WHERE session_id = ?"
            " ORDER BY turn_index DESC LIMIT 1",
            (session_id,),
        ).fetchone()
        if row is None:
            return
        index, start_len, stored = row
        tokens = self._cipher.decrypt(stored, _place(session_id, index))
        kept = tokens[: (length - start_len) * TOKEN_BYTES]
        if len(kept) < len(tokens):
            db.execute(
                "UPDATE turns SET tokens = ? WHERE session_id = ? AND turn_index = ?",
                (self._cipher.encrypt(kept, _place(session_id, index)), session_id, index),
            )

    def _share(self, db: sqlite3.Connection, entry: LedgerEntry, base: Base) -> int:
        """Makes a segment of the session's own tokens. Returns its number."""
        segment = self._added(db, base, self._own(db, entry, base[1]))
        db.execute("DELETE FROM turns WHERE session_id = ?", (entry.session_id,))
        _set_base(db, entry.session_id, (segment, entry.tokens))
        return segment

    def _added(self, db: sqlite3.Connection, base: Base, tokens: bytes) -> int:
        """The number of a new segment, which continues the line of `base`."""
        (segment,) = db.execute("SELECT coalesce(max(segment), 0) + 1 FROM segments").fetchone()
        end_len = base[1] + count_tokens(tokens)
        stored = self._cipher.encrypt(tokens, _place_of_segment(segment))
        db.execute("INSERT INTO segments VALUES (?, ?, ?, ?, ?)", (segment, *base, end_len, stored))
        return int(segment)

    def _own(self, db: sqlite3.Connection, entry: LedgerEntry, base_len: int) -> bytes:
        """The session's tokens after its base: every turn's tokens, each after cutting what the turn rewound."""
        own = bytearray()
        for turn_index, start_len, tokens in db.execute(
            "SELECT turn_index, start_len, tokens FROM turns WHERE session_id = ? ORDER BY turn_index",
            (entry.session_id,),
        ):
            del own[(start_len - base_len) * TOKEN_BYTES :]
            own += self._cipher.decrypt(tokens, _place(entry.session_id, turn_index))
        if base_len + count_tokens(own) != entry.tokens:
            raise StoreError(f"session log: turns of {named(entry.session_id)} are missing")
        return bytes(own)

    def _line(self, db: sqlite3.Connection, base: Base) -> bytes:
        segment, end_len = base
        parts = []
        while segment is not None:
            before, start_len, _ = _segment(db, segment)
            tokens = self._tokens_of(db, segment)
            parts.append(tokens[: (end_len - start_len) * TOKEN_BYTES])
            segment, end_len = before, start_len
        return b"".join(reversed(parts))

    def _tokens_of(self, db: sqlite3.Connection, segment: int) -> bytes:
        (stored,) = db.execute("SELECT tokens FROM segments WHERE segment = ?", (segment,)).fetchone()
        return self._cipher.decrypt(stored, _place_of_segment(segment))

    def _release(self, db: sqlite3.Connection, segment: int | None) -> None:
        """Cuts or deletes the segment as needed, after one of its uses has ended or become shorter."""
        while segment is not None:
            before, start_len, end_len = _segment(db, segment)
            used_len = _used_len(db, segment)
            if used_len == 0:
                db.execute("DELETE FROM segments WHERE segment = ?", (segment,))
                segment = before
                continue
            if used_len < end_len:
                kept = self._tokens_of(db, segment)[: (used_len - start_len) * TOKEN_BYTES]
                db.execute(
                    "UPDATE segments SET end_len = ?, tokens = ? WHERE segment = ?",
                    (used_len, self._cipher.encrypt(kept, _place_of_segment(segment)), segment),
                )
            return


def _base(db: sqlite3.Connection, session_id: str) -> Base:
    base, base_len = db.execute(
        "SELECT base, base_len FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    return base, base_len


def _set_base(db: sqlite3.Connection, session_id: str, base: Base) -> None:
    db.execute("UPDATE sessions SET base = ?, base_len = ? WHERE session_id = ?", (*base, session_id))


def _segment(db: sqlite3.Connection, segment: int) -> tuple[int | None, int, int]:
    """The segment's base, and where it begins and ends. Raises StoreError if it is missing."""
    row = db.execute("SELECT base, base_len, end_len FROM segments WHERE segment = ?", (segment,)).fetchone()
    if row is None:
        raise StoreError(f"session log: {_place_of_segment(segment)} is missing")
    before, start_len, end_len = row
    return before, start_len, end_len


def _cut(db: sqlite3.Connection, base: Base) -> Base:
    """The base for the same tokens that names the segment with the last of them."""
    segment, length = base
    while segment is not None:
        before, start_len, _ = _segment(db, segment)
        if start_len < length:
            break
        segment = before
    return segment, length


def _used_len(db: sqlite3.Connection, segment: int) -> int:
    """The length of the longest use of the segment; 0 if it has no users."""
    longest = [
        db.execute(f"SELECT max(base_len) FROM {table} WHERE base = ?", (segment,)).fetchone()[0] or 0
        for table in ("sessions", "segments")
    ]
    return max(longest)


def _place(session_id: str, turn_index: int) -> str:
    return f"turn {turn_index} of {session_id}"


def _place_of_segment(segment: int) -> str:
    return f"segment {segment}"
