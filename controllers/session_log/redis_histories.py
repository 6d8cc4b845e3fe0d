"""Histories in a session log in Redis: each session's turns, after the tokens that it shares with other sessions. A
session has

- `turns`, a hash: under each turn's index its start in eight bytes, followed by its tokens, and under `base` the
  segment that the session begins with (redis_segments.py);
- `history`, a string, only if an earlier version began the session: its tokens until then.

Nothing here changes the log. A change is returned as commands, with the texts that it was derived from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from controllers.errors import StoreError
from controllers.records import LedgerEntry, TurnRecord
from controllers.session_keys import named
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.redis_log import FIELDS_AT_ONCE, Command, LogReader
from controllers.session_log.redis_segments import Base, Change, RedisSegments, user_segment, user_session
from controllers.session_log.redis_turn_fields import fields_back
from controllers.tokens import TOKEN_BYTES, count_tokens

BASE = "base"
START_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Turns:
    """A session's hash `turns`. `by_turn` has index, start and stored tokens of each turn, in order. Turns past the
    session's last one are leftovers of a failover of Redis that lost part of a change."""

    base: Base
    by_turn: list[tuple[int, int, bytes]]

    @classmethod
    def parse(cls, fields: dict[bytes, bytes]) -> _Turns:
        by_turn = sorted(
            (int(field), _start_len(turn), turn[START_BYTES:])
            for field, turn in fields.items()
            if field != BASE.encode()
        )
        return cls(_parse_base(fields.get(BASE.encode())), by_turn)


class RedisHistories:
    def __init__(self, log: LogReader, cipher: LogCipher) -> None:
        self._log = log
        self._cipher = cipher
        self._segments = RedisSegments(log, cipher)

    def reads(self, session_id: str) -> tuple[Command, Command]:
        """The commands whose answers `history` needs."""
        return ("GET", self._former_key(session_id)), ("HGETALL", self._key(session_id))

    def history(self, entry: LedgerEntry, former: bytes | None, fields: dict[bytes, bytes]) -> bytes:
        """The session's tokens. Raises StoreError if some are missing."""
        turns = _Turns.parse(fields)
        return self._segments.line(turns.base) + self._own(entry, former, turns)

    def read(self, entry: LedgerEntry) -> bytes:
        return self.history(entry, *self._log.read(*self.reads(entry.session_id)))

    def opened(self, session_id: str) -> Command:
        """Deletes leftovers of a closed session of this name: an earlier version leaves keys that it does not know."""
        return ("DEL", self._key(session_id), self._former_key(session_id))

    def appended(self, entry: LedgerEntry, record: TurnRecord) -> Change:
        """Adds the session's next turn. O(new tokens, and turns that it cuts), unless it rewinds into shared tokens."""
        tokens = self._cipher.encrypt(record.tokens, _place(record.session_id, record.turn_index))
        turn = record.start_len.to_bytes(START_BYTES, "little") + tokens
        added: Command = ("HSET", self._key(record.session_id), record.turn_index, turn)
        if record.start_len == entry.tokens:
            return Change([added], {})
        commands, guards = self._rewound(entry, record.start_len)
        return Change([*commands, added], guards)

    def forked(self, parent: LedgerEntry, child_id: str, length: int) -> Change:
        """Makes the child begin with `length` tokens of its parent. O(tokens that no other session shares yet), so
        later forks at this place cost nothing."""
        user, child = user_session(parent.session_id), user_session(child_id)
        former, fields = self._log.read(*self.reads(parent.session_id))
        turns = _Turns.parse(fields)
        if length <= turns.base.length:
            base = self._segments.cut(turns.base, length)
            if base.segment is None:
                return Change([], {})
            commands, guards = self._segments.changed({base.segment: {child: length}})
            return Change([*commands, self._based(child_id, base)], guards)
        own = self._own(parent, former, turns)
        uses = {user: parent.tokens, child: length}
        segment, commands = self._segments.made(turns.base, parent.tokens, own, uses)
        commands += [
            self.opened(parent.session_id),
            self._based(parent.session_id, Base(segment, parent.tokens)),
            self._based(child_id, Base(segment, length)),
        ]
        if turns.base.segment is None:
            return Change(commands, {})
        users = {user: 0, user_segment(segment): turns.base.length}
        more, guards = self._segments.changed({turns.base.segment: users})
        return Change([*commands, *more], guards)

    def begun(self, session_id: str, tokens: bytes) -> list[Command]:
        """Makes a new session begin with these tokens."""
        if not tokens:
            return []
        length = count_tokens(tokens)
        segment, commands = self._segments.made(Base(), length, tokens, {user_session(session_id): length})
        return [*commands, self._based(session_id, Base(segment, length))]

    def closed(self, session_id: str) -> Change:
        """Deletes all of the session's history."""
        gone: Command = ("DEL", self._key(session_id), self._former_key(session_id))
        base = _parse_base(self._log.read(("HGET", self._key(session_id), BASE))[0])
        if base.segment is None:
            return Change([gone], {})
        commands, guards = self._segments.changed({base.segment: {user_session(session_id): 0}})
        return Change([*commands, gone], guards)

    def _rewound(self, entry: LedgerEntry, start_len: int) -> Change:
        """Deletes the session's tokens after the first `start_len`. Tokens that others share stay until the last of
        these is gone."""
        session_id = entry.session_id
        former, found = self._log.read(
            ("GET", self._former_key(session_id)), ("HGET", self._key(session_id), BASE)
        )
        commands = self._cut_turns(entry, start_len)
        if former is not None:
            commands += self._cut_former(entry, former, start_len)
        whole = _parse_base(found)
        if start_len >= whole.length or whole.segment is None:
            return Change(commands, {})
        base, user = self._segments.cut(whole, start_len), user_session(session_id)
        uses = {whole.segment: {user: 0}}
        if base.segment is not None:
            uses.setdefault(base.segment, {})[user] = start_len
        more, guards = self._segments.changed(uses)
        return Change([*commands, *more, self._based(session_id, base)], guards)

    def _cut_turns(self, entry: LedgerEntry, length: int) -> list[Command]:
        """Deletes the turns that begin past the first `length` tokens. The last one left ends there. Reads these and
        one or two more."""
        key = self._key(entry.session_id)
        past: list[int] = []
        shorter: list[Command] = []
        for index, turn in fields_back(self._log, key, entry.turns):
            if _start_len(turn) < length:
                shorter = self._cut_turn(entry.session_id, index, turn, length)
                break
            past.append(index)
        deleted: list[Command] = [
            ("HDEL", key, *past[at : at + FIELDS_AT_ONCE]) for at in range(0, len(past), FIELDS_AT_ONCE)
        ]
        return deleted + shorter

    def _cut_turn(self, session_id: str, index: int, turn: bytes, length: int) -> list[Command]:
        """Makes the turn, which begins within the first `length` tokens, end there."""
        place = _place(session_id, index)
        tokens = self._cipher.decrypt(turn[START_BYTES:], place)
        kept = tokens[: (length - _start_len(turn)) * TOKEN_BYTES]
        if len(kept) == len(tokens):
            return []
        shorter = turn[:START_BYTES] + self._cipher.encrypt(kept, place)
        return [("HSET", self._key(session_id), index, shorter)]

    def _cut_former(self, entry: LedgerEntry, former: bytes, length: int) -> list[Command]:
        """Makes what an earlier version wrote end there, or where the first turn begins."""
        key = self._key(entry.session_id)
        starts = [_start_len(turn) for _, turn in fields_back(self._log, key, entry.turns)]
        kept = former[: min([length, *starts]) * TOKEN_BYTES]
        if len(kept) == len(former):
            return []
        key = self._former_key(entry.session_id)
        return [("SET", key, kept) if kept else ("DEL", key)]

    def _own(self, entry: LedgerEntry, former: bytes | None, turns: _Turns) -> bytes:
        """The session's tokens after its base: every turn's tokens, each after cutting what the turn rewound."""
        own = bytearray(former or b"")
        for index, start_len, stored in turns.by_turn:
            if index >= entry.turns:
                break
            del own[(start_len - turns.base.length) * TOKEN_BYTES :]
            own += self._cipher.decrypt(stored, _place(entry.session_id, index))
        own_len = entry.tokens - turns.base.length
        del own[own_len * TOKEN_BYTES :]  # an earlier version left rewound tokens there
        if count_tokens(own) != own_len:
            raise StoreError(f"session log: tokens of {named(entry.session_id)} are missing")
        return bytes(own)

    def _based(self, session_id: str, base: Base) -> Command:
        if base.segment is None:
            return ("HDEL", self._key(session_id), BASE)
        return ("HSET", self._key(session_id), BASE, json.dumps(base))

    def _key(self, session_id: str) -> str:
        return self._log.key("turns", session_id)

    def _former_key(self, session_id: str) -> str:
        return self._log.key("history", session_id)


def _start_len(turn: bytes) -> int:
    return int.from_bytes(turn[:START_BYTES], "little")


def _parse_base(text: bytes | None) -> Base:
    return Base() if text is None else Base(*json.loads(text))


def _place(session_id: str, turn_index: int) -> str:
    return f"turn {turn_index} of {session_id}"
