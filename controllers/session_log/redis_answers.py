"""The answers that a session log in Redis keeps to be sent again, see kept_answers.py: each session has a hash
`results`, by the index of the turn. Their keys are in its text (redis_session.py).

Nothing here changes the log. A change is returned as commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from controllers.errors import StoreError
from controllers.records import StoredResult, TurnRecord
from controllers.session_log.kept_answers import lost, outdated
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.log_rules import check_key
from controllers.session_log.redis_log import Command, LogReader
from controllers.session_log.redis_session import StoredSession


class RedisAnswers:
    """`ends` says where turns end, by index."""

    def __init__(self, log: LogReader, cipher: LogCipher) -> None:
        self._log = log
        self._cipher = cipher

    def reads(self, session_id: str) -> Command:
        """The command whose answer `kept` needs."""
        return ("HGETALL", self._key(session_id))

    def kept(
        self, session: StoredSession, fields: Mapping[bytes, bytes], ends: Mapping[int, int]
    ) -> tuple[StoredResult, ...]:
        """Raises StoreError if one is missing."""
        session_id = session.entry.session_id
        return tuple(
            StoredResult(key, index, self._result(session_id, fields, index), digest, ends.get(index))
            for index, key, digest in session.kept
        )

    def appended(self, session: StoredSession, record: TurnRecord) -> tuple[StoredSession, list[Command]]:
        """Keeps the answer of a turn with a key, and deletes those that are now outdated. Returns the session with its
        keys. Raises IdempotencyConflict."""
        if record.idempotency_key is None:
            return session, []
        check_key(record, [key for _, key, _ in session.kept])
        kept = (*session.kept, (record.turn_index, record.idempotency_key, record.digest))
        gone = [kept[place] for place in outdated([key for _, key, _ in kept])]
        commands = [self._set(record.session_id, record.turn_index, record.result)]
        commands += [("HDEL", self._key(record.session_id), index) for index, _, _ in gone]
        return replace(session, kept=tuple(each for each in kept if each not in gone)), commands

    def cut(self, session: StoredSession, length: int, ends: Mapping[int, int]) -> list[Command]:
        """Deletes the answers of turns that are no longer whole in the history's first `length` tokens. Their keys
        stay."""
        turns = [index for index, _, _ in session.kept]
        return [self._set(session.entry.session_id, index, b"") for index in lost(turns, ends, length)]

    def forgotten(self, session: StoredSession, turn_index: int) -> list[Command]:
        """Deletes what the turn answered. Its key stays."""
        turns = [index for index, _, _ in session.kept]
        return [self._set(session.entry.session_id, turn_index, b"")] if turn_index in turns else []

    def renamed(self, former: str, session_id: str) -> list[Command]:
        return [("COPY", self._key(former), self._key(session_id)), self.closed(former)]

    def closed(self, session_id: str) -> Command:
        return ("DEL", self._key(session_id))

    def _result(self, session_id: str, fields: Mapping[bytes, bytes], index: int) -> bytes:
        stored = fields.get(b"%d" % index)
        if stored is None:
            raise StoreError(f"session log: what turn {index} answered is missing")
        return self._cipher.decrypt(stored, _place(session_id, index))

    def _set(self, session_id: str, index: int, result: bytes) -> Command:
        return ("HSET", self._key(session_id), index, self._cipher.encrypt(result, _place(session_id, index)))

    def _key(self, session_id: str) -> str:
        return self._log.key("results", session_id)


def _place(session_id: str, index: int) -> str:
    return f"what turn {index} of {session_id} answered"
