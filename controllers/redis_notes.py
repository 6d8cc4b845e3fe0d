"""The session log's notes of turns in Redis: each session has a hash `notes`, by the index of the turn.

Nothing here changes the log. A change is returned as commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from controllers.errors import StoreError
from controllers.log_cipher import LogCipher
from controllers.records import LedgerEntry, TurnNote, TurnRecord
from controllers.redis_log import Command
from controllers.redis_segments import LogReader
from controllers.turn_notes import (
    counting,
    decode_note,
    encode_note,
    has_note,
    inherited,
    note_of,
    num_within,
)

MOST_IN_PAGE = 1000
"""A script cannot pass on many more words in one command."""


class RedisNotes:
    def __init__(self, log: LogReader, cipher: LogCipher) -> None:
        self._log = log
        self._cipher = cipher

    def reads(self, session_id: str) -> Command:
        """The command whose answer `notes` needs."""
        return ("HGETALL", self._key(session_id))

    def notes(self, entry: LedgerEntry, fields: Mapping[bytes, bytes]) -> list[TurnNote]:
        """The notes that count."""
        return self._counting(entry, self._parsed(entry.session_id, fields))

    def read(self, entry: LedgerEntry) -> list[TurnNote]:
        """The notes that count."""
        return self._counting(entry, self.stored(entry.session_id))

    def page(self, entry: LedgerEntry, after: int | None, room: int) -> list[TurnNote]:
        """Those of turns after `after` (None: from the first) that fit into `room` bytes, but at least one. Reads no
        others."""
        key = self._key(entry.session_id)
        (fields,) = self._log.read(("HKEYS", key))
        turns = sorted(turn for turn in map(int, fields) if after is None or turn > after)[:MOST_IN_PAGE]
        if not turns:
            return []
        sizes = self._log.read(*(("HSTRLEN", key, turn) for turn in turns))
        del turns[num_within(sizes, room) :]
        (stored,) = self._log.read(("HMGET", key, *turns))
        if None in stored:
            raise StoreError("session log: a note was deleted while it was read")
        notes = (self._note(entry.session_id, *each) for each in zip(turns, stored, strict=True))
        return self._counting(entry, notes)

    def opened(self, session_id: str) -> Command:
        """Deletes leftovers of a closed session of this name: an earlier version leaves keys that it does not know."""
        return ("DEL", self._key(session_id))

    def stored(self, session_id: str) -> list[TurnNote]:
        """All notes of the session, ordered by turn. Some may not count any more."""
        (fields,) = self._log.read(self.reads(session_id))
        return sorted(self._parsed(session_id, fields), key=lambda note: note.turn_index)

    def cut(self, session_id: str, notes: Sequence[TurnNote], length: int) -> list[Command]:
        """Deletes the notes past the history's first `length` tokens. `notes` are all of the session's (`stored`)."""
        past = [note for note in notes if note.said_len > length]
        commands: list[Command] = [("HDEL", self._key(session_id), note.turn_index) for note in past]
        last = next((note for note in reversed(notes) if note not in past), None)
        if last is not None and last.end_len > length:
            commands.append(self._set(session_id, last.cut(length)))
        return commands

    def appended(self, record: TurnRecord) -> list[Command]:
        """Adds the next turn's note. O(new bytes)."""
        return [self._set(record.session_id, note_of(record))] if has_note(record) else []

    def forked(
        self, parent: LedgerEntry, notes: Iterable[TurnNote], child_id: str, length: int
    ) -> list[Command]:
        """Gives the child the notes of its parent's turns within its first `length` tokens."""
        return self.added(child_id, inherited(notes, parent, length))

    def added(self, session_id: str, notes: Iterable[TurnNote]) -> list[Command]:
        """Gives these notes to a session that has none of these numbers."""
        return [self._set(session_id, note) for note in notes]

    def forgotten(self, session_id: str, turn_index: int) -> list[Command]:
        (stored,) = self._log.read(("HGET", self._key(session_id), turn_index))
        if stored is None:
            return []
        return [self._set(session_id, replace(self._note(session_id, turn_index, stored), note=b""))]

    def closed(self, session_id: str) -> Command:
        return ("DEL", self._key(session_id))

    def _set(self, session_id: str, note: TurnNote) -> Command:
        stored = self._cipher.encrypt(encode_note(note), _place(session_id, note.turn_index))
        return ("HSET", self._key(session_id), note.turn_index, stored)

    def _counting(self, entry: LedgerEntry, notes: Iterable[TurnNote]) -> list[TurnNote]:
        """Notes of later turns than the session has are leftovers of a failover of Redis that lost part of a change."""
        return counting((note for note in notes if note.turn_index < entry.turns), entry.tokens)

    def _parsed(self, session_id: str, fields: Mapping[bytes, bytes]) -> list[TurnNote]:
        return [self._note(session_id, int(field), stored) for field, stored in fields.items()]

    def _note(self, session_id: str, turn_index: int, stored: bytes) -> TurnNote:
        return decode_note(turn_index, self._cipher.decrypt(stored, _place(session_id, turn_index)))

    def _key(self, session_id: str) -> str:
        return self._log.key("notes", session_id)


def _place(session_id: str, turn_index: int) -> str:
    return f"what turn {turn_index} of {session_id} said"
