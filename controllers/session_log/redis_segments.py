"""Segments of histories in a session log in Redis: tokens that sessions share, see sqlite_histories.py. A segment has

- `segment`, a string: its base, where it ends and how often it has changed, as JSON;
- `tokens`, a string;
- `uses`, a sorted set: how many tokens of its line each session, and each segment, uses.

Nothing here changes the log. A change is returned as commands, with the texts that it was derived from.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import NamedTuple

from controllers.errors import StoreError
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.redis_log import Command, Guards, LogReader
from controllers.tokens import TOKEN_BYTES

SEGMENT_ID_BYTES = 8


class Base(NamedTuple):
    """The segment that a line ends with (None: there is none), and how many of the line's tokens are used."""

    segment: str | None = None
    length: int = 0


class Change(NamedTuple):
    commands: list[Command]
    guards: Guards


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment. `text` is its text in the log (None: it is new)."""

    base: Base
    end_len: int
    changes: int = 0
    text: bytes | None = None

    def changed(self, end_len: int) -> bytes:
        return json.dumps([self.base, end_len, self.changes + 1]).encode()


class RedisSegments:
    def __init__(self, log: LogReader, cipher: LogCipher) -> None:
        self._log = log
        self._cipher = cipher

    def line(self, base: Base) -> bytes:
        """The tokens of the line."""
        parts = []
        while base.segment is not None:
            text, stored = self._log.read(
                ("GET", self._key(base.segment)), ("GET", self._tokens(base.segment))
            )
            before = _parsed(base.segment, text).base
            tokens = self._cipher.decrypt(stored or b"", _place(base.segment))
            parts.append(tokens[: (base.length - before.length) * TOKEN_BYTES])
            base = before
        return b"".join(reversed(parts))

    def cut(self, base: Base, length: int) -> Base:
        """The base of the first `length` tokens of the line: it names the segment with the last of them."""
        while base.segment is not None:
            before = self._read(base.segment).base
            if before.length < length:
                return Base(base.segment, length)
            base = before
        return Base()

    def made(
        self, base: Base, end_len: int, tokens: bytes, uses: dict[str, int]
    ) -> tuple[str, list[Command]]:
        """A new segment's id and the commands that make it. The caller must record that it uses its base
        (`changed`)."""
        segment = secrets.token_hex(SEGMENT_ID_BYTES)
        pairs = [word for user, length in uses.items() for word in (length, user)]
        return segment, [
            ("SET", self._key(segment), _Segment(base, end_len).changed(end_len)),
            ("SET", self._tokens(segment), self._cipher.encrypt(tokens, _place(segment))),
            ("ZADD", self._uses(segment), *pairs),
        ]

    def changed(self, uses: dict[str, dict[str, int]]) -> Change:
        """Changes how many tokens users use of segments. `uses` is by segment, then by user; 0: the user leaves it. A
        segment that is left comes before the segments that it is based on.

        A segment is cut to its longest use. A segment without users is deleted, and leaves its own base."""
        commands: list[Command] = []
        guards: dict[str, bytes | None] = {}
        todo = {segment: dict(users) for segment, users in uses.items()}
        while todo:
            segment = next(iter(todo))
            users = todo.pop(segment)
            found = self._read(segment)
            guards[self._key(segment)] = found.text
            used_len = max(self._used_by_others(segment, users), *users.values())
            if used_len:
                commands += self._used(segment, found, users, used_len)
                continue
            commands.append(("DEL", self._key(segment), self._tokens(segment), self._uses(segment)))
            if found.base.segment is not None:
                left = todo.pop(found.base.segment, {})
                todo = {found.base.segment: {**left, user_segment(segment): 0}, **todo}
        return Change(commands, guards)

    def _used(self, segment: str, found: _Segment, users: dict[str, int], used_len: int) -> list[Command]:
        end_len = min(found.end_len, used_len)
        commands: list[Command] = [("SET", self._key(segment), found.changed(end_len))]
        for user, length in users.items():
            word: Command = ("ZADD", self._uses(segment), length, user)
            commands.append(word if length else ("ZREM", self._uses(segment), user))
        if end_len < found.end_len:
            (stored,) = self._log.read(("GET", self._tokens(segment)))
            tokens = self._cipher.decrypt(stored, _place(segment))
            kept = tokens[: (end_len - found.base.length) * TOKEN_BYTES]
            commands.append(("SET", self._tokens(segment), self._cipher.encrypt(kept, _place(segment))))
        return commands

    def _used_by_others(self, segment: str, users: dict[str, int]) -> int:
        """The longest use of the segment by users that are not in `users`; 0 if there is none."""
        (longest,) = self._log.read(("ZREVRANGE", self._uses(segment), 0, len(users)))
        other = next((user for user in longest if user.decode() not in users), None)
        if other is None:
            return 0
        return int(self._log.read(("ZSCORE", self._uses(segment), other))[0])

    def _read(self, segment: str) -> _Segment:
        return _parsed(segment, self._log.read(("GET", self._key(segment)))[0])

    def _key(self, segment: str) -> str:
        return self._log.key("segment", segment)

    def _tokens(self, segment: str) -> str:
        return self._log.key("tokens", segment)

    def _uses(self, segment: str) -> str:
        return self._log.key("uses", segment)


def _parsed(segment: str, text: bytes | None) -> _Segment:
    if text is None:
        raise StoreError(f"session log: {_place(segment)} is missing")
    base, end_len, changes = json.loads(text)
    return _Segment(Base(*base), end_len, changes, text)


def user_session(session_id: str) -> str:
    """A session's name among the users of a segment."""
    return f"session {session_id}"


def user_segment(segment: str) -> str:
    return f"segment {segment}"


def _place(segment: str) -> str:
    return f"segment {segment}"
