"""The session log's notes of turns in Redis: each session has a hash `notes`, by the index of the turn.

Nothing here changes the log. A change is returned as commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from controllers.records import LedgerEntry, TurnNote, TurnRecord
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.redis_log import Command, LogReader
from controllers.session_log.redis_turn_fields import fields_after, fields_back, fields_of
from controllers.session_log.turn_notes import (
    counting,
    decode_note,
    encode_note,
    has_note,
    inherited,
    note_of,
)


class RedisNotes:
    def __init__(self, log: LogReader, cipher: LogCipher) -> None:
        self._log = log
        self._cipher = cipher

    def reads(self, session_id: str) -> Command:
        """The command whose answer `notes` needs."""
        return ("HGETALL", self._key(session_id))

    def notes(self, entry: LedgerEntry, fields: Mapping[bytes, bytes]) -> list[TurnNote]:
        """The notes that count."""
        notes = [self._note(entry.session_id, int(turn), stored) for turn, stored in fields.items()]
        return self._counting(entry, notes)

    def read(self, entry: LedgerEntry) -> list[TurnNote]:
        """The notes that count."""
        return self.notes(entry, *self._log.read(self.reads(entry.session_id)))

    def page(self, entry: LedgerEntry, after: int | None, room: int) -> list[TurnNote]:
        """Those of turns after `after` (None: from the first) that have up to `room` bytes, but at least one. Reads no
        others."""
        stored = fields_after(self._log, self._key(entry.session_id), after, room)
        return self._counting(entry, [self._note(entry.session_id, *each) for each in stored])

    def ends(self, session_id: str, turns: Sequence[int]) -> dict[int, int]:
        """Where those of the turns end that have a note."""
        stored = fields_of(self._log, self._key(session_id), turns)
        return {turn: self._note(session_id, turn, note).end_len for turn, note in stored}

    def opened(self, session_id: str) -> Command:
        """Deletes leftovers of a closed session of this name: an earlier version leaves keys that it does not know."""
        return ("DEL", self._key(session_id))

    def cut(self, entry: LedgerEntry, length: int) -> list[Command]:
        """Deletes the notes past the history's first `length` tokens. Reads these and one or two more."""
        session_id = entry.session_id
        key = self._key(session_id)
        commands: list[Command] = []
        for turn, stored in fields_back(self._log, key, entry.turns):
            note = self._note(session_id, turn, stored)
            if note.said_len > length:
                commands.append(("HDEL", key, turn))
                continue
            if note.end_len > length:
                commands.append(self._set(session_id, note.cut(length)))
            break
        return commands

    def appended(self, record: TurnRecord) -> list[Command]:
        """Adds the next turn's note. O(new bytes). A failover of Redis that lost part of a change may have left
        another."""
        if has_note(record):
            return [self._set(record.session_id, note_of(record))]
        return [("HDEL", self._key(record.session_id), record.turn_index)]

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

    def _note(self, session_id: str, turn_index: int, stored: bytes) -> TurnNote:
        return decode_note(turn_index, self._cipher.decrypt(stored, _place(session_id, turn_index)))

    def _key(self, session_id: str) -> str:
        return self._log.key("notes", session_id)


def _place(session_id: str, turn_index: int) -> str:
    return f"what turn {turn_index} of {session_id} said"
