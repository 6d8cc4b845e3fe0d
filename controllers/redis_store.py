"""RedisSessionStore: the session log in Redis, for clusters whose log has to outlive the controller's machine.

Of each session there are

- `session`, a string: all but its tokens and results, as JSON (`_Session`);
- `history`, a string: its committed tokens. What lies past the session's length was rewound, and is overwritten by what
  comes next, so that turns and rewinds cost O(new tokens);
- `results`, a hash: what turns with an idempotency key answered, by their index.

Besides there are `sessions`, the set of all ids, `epoch_floor`, and `deployment`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from controllers.log_rules import adds_turn, changes_owner, check_fork, check_key, exists, made_by, not_found
from controllers.records import (
    KEPT_RESULTS,
    LedgerEntry,
    ModelFingerprint,
    SessionRecord,
    StoredResult,
    TurnRecord,
)
from controllers.redis_log import Command, RedisLog
from controllers.settings import RedisLogSettings
from controllers.tokens import TOKEN_BYTES, count_tokens

ENTRIES_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class _Session:
    """`last` identifies the last turn, its tokens aside. `kept` are the turns whose results are, oldest first: index,
    idempotency key, digest. Layout 1 has no `model`."""

    entry: LedgerEntry
    tools: str | None = None
    last: list[int | str | None] | None = None
    kept: tuple[tuple[int, str, str | None], ...] = ()
    model: ModelFingerprint | None = None

    @classmethod
    def parse(cls, text: bytes) -> _Session:
        fields = json.loads(text)
        kept = tuple((index, key, digest) for index, key, digest in fields.pop("kept"))
        model = fields.pop("model", None)
        return cls(
            LedgerEntry(**fields.pop("entry")),
            kept=kept,
            model=None if model is None else ModelFingerprint(**model),
            **fields,
        )

    def text(self) -> str:
        return json.dumps(asdict(self))


class RedisSessionStore:
    """A SessionStore in Redis. `clock` returns Unix time, `timer` monotonic time, in seconds. Raises StoreError, see
    RedisLog.

    What outlives Redis itself is for its configuration to say.
    """

    def __init__(
        self,
        settings: RedisLogSettings,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = RedisLog(settings, timer)
        self._clock = clock

    def open(self, record: SessionRecord) -> None:
        assert not record.history
        assert not record.turns
        self._refuse_known(record.session_id)
        self._log.change(self._added(record))

    def fork(self, parent_id: str, length: int, record: SessionRecord) -> SessionRecord:
        parent = self._session(parent_id)
        check_fork(parent.entry, length)
        self._refuse_known(record.session_id)
        history = self._tokens(parent_id, 0, length)
        record = replace(record, history=history, tools=parent.tools, model=parent.model)
        self._log.change([self._written(record.session_id, 0, record.history), *self._added(record)])
        return record

    def assign(self, session_id: str, replica_id: str, epoch: int) -> None:
        session = self._session(session_id)
        if changes_owner(session.entry, replica_id, epoch):
            entry = replace(session.entry, replica_id=replica_id, epoch=epoch, last_used_s=self._clock())
            self._log.change([self._set(replace(session, entry=entry))])

    def append_turn(self, record: TurnRecord) -> None:
        assert len(record.tokens) % TOKEN_BYTES == 0
        session = self._session(record.session_id)
        if not adds_turn(session.entry, record, lambda: self._is_last(session, record)):
            return
        entry = replace(
            session.entry,
            tokens=record.end_len,
            turns=record.turn_index + 1,
            last_used_s=self._clock(),
        )
        session = replace(session, entry=entry, last=_identity(record), model=made_by(session.model, record))
        if record.start_len == 0:
            session = replace(session, tools=record.tools)
        # First what may fail: history has a largest size.
        commands = [self._written(record.session_id, record.start_len, record.tokens)]
        if record.idempotency_key is not None:
            check_key(record, [key for _, key, _ in session.kept])
            kept = (*session.kept, (record.turn_index, record.idempotency_key, record.digest))
            session = replace(session, kept=kept[-KEPT_RESULTS:])
            results = self._results(record.session_id)
            commands.append(("HSET", results, record.turn_index, record.result))
            commands += [("HDEL", results, index) for index, _, _ in kept[:-KEPT_RESULTS]]
        self._log.change([*commands, self._set(session)])

    def load(self, session_id: str) -> SessionRecord:
        session = self._session(session_id)
        (results,) = self._log.read(("HGETALL", self._results(session_id)))
        kept = (
            StoredResult(key, index, self._result(results, index), digest)
            for index, key, digest in session.kept
        )
        history = self._tokens(session_id, 0, session.entry.tokens)
        return session.entry.record(history, tuple(kept), session.tools, session.model)

    def load_all_entries(self) -> list[LedgerEntry]:
        (members,) = self._log.read(("SMEMBERS", self._log.key("sessions")))
        keys = [self._key(session_id) for session_id in sorted(member.decode() for member in members)]
        entries: list[LedgerEntry] = []
        for start in range(0, len(keys), ENTRIES_AT_ONCE):
            (texts,) = self._log.read(("MGET", *keys[start : start + ENTRIES_AT_ONCE]))
            entries += [self._parsed(text).entry for text in texts]
        return entries

    def epoch_floor(self) -> int:
        return int(self._log.read(("GET", self._log.key("epoch_floor")))[0] or 0)

    def touch(self, session_id: str, last_used_s: float) -> None:
        session = self._session(session_id)
        self._log.change([self._set(replace(session, entry=replace(session.entry, last_used_s=last_used_s)))])

    def close(self, session_id: str) -> bool:
        found, floor = self._log.read(("GET", self._key(session_id)), ("GET", self._log.key("epoch_floor")))
        if found is None:
            return False
        keys = (self._key(session_id), self._history(session_id), self._results(session_id))
        self._log.change(
            [
                (
                    "SET",
                    self._log.key("epoch_floor"),
                    max(int(floor or 0), self._parsed(found).entry.epoch),
                ),
                ("SREM", self._log.key("sessions"), session_id),
                ("DEL", *keys),
            ]
        )
        return True

    def deployment(self) -> str | None:
        (text,) = self._log.read(("GET", self._log.key("deployment")))
        return None if text is None else text.decode()

    def set_deployment(self, text: str) -> None:
        self._log.change([("SET", self._log.key("deployment"), text)])

    def disconnect(self) -> None:
        self._log.close()

    def _key(self, session_id: str) -> str:
        return self._log.key("session", session_id)

    def _history(self, session_id: str) -> str:
        return self._log.key("history", session_id)

    def _results(self, session_id: str) -> str:
        return self._log.key("results", session_id)

    def _session(self, session_id: str) -> _Session:
        (found,) = self._log.read(("GET", self._key(session_id)))
        if found is None:
            raise not_found(session_id)
        return self._parsed(found)

    def _parsed(self, text: bytes | None) -> _Session:
        try:
            return _Session.parse(text or b"")
        except (ValueError, TypeError, KeyError) as error:
            raise self._log.error(f"a session cannot be read: {error!r}") from error

    def _result(self, results: dict[bytes, bytes], index: int) -> bytes:
        try:
            return results[b"%d" % index]
        except KeyError:
            raise self._log.error(f"what turn {index} answered is missing") from None

    def _refuse_known(self, session_id: str) -> None:
        if self._log.read(("EXISTS", self._key(session_id)))[0]:
            raise exists(session_id)

    def _set(self, session: _Session) -> Command:
        return ("SET", self._key(session.entry.session_id), session.text())

    def _written(self, session_id: str, start_len: int, tokens: bytes) -> Command:
        return ("SETRANGE", self._history(session_id), start_len * TOKEN_BYTES, tokens)

    def _added(self, record: SessionRecord) -> list[Command]:
        entry = LedgerEntry.of(record, self._clock())
        return [
            self._set(_Session(entry, record.tools, model=record.model)),
            ("SADD", self._log.key("sessions"), record.session_id),
        ]

    def _tokens(self, session_id: str, start_len: int, end_len: int) -> bytes:
        """The history's tokens from `start_len` to `end_len`."""
        start, end = start_len * TOKEN_BYTES, end_len * TOKEN_BYTES
        if start == end:
            return b""
        tokens: bytes = self._log.read(("GETRANGE", self._history(session_id), start, end - 1))[0]
        if len(tokens) != end - start:
            raise self._log.error(f"tokens of session {session_id!r} are missing")
        return tokens

    def _is_last(self, session: _Session, record: TurnRecord) -> bool:
        """True if the last turn is just this record, results aside: they are no part of the history."""
        return (
            session.last == _identity(record)
            and self._tokens(record.session_id, record.start_len, record.end_len) == record.tokens
        )


def _identity(record: TurnRecord) -> list[int | str | None]:
    tokens = count_tokens(record.tokens)
    return [record.start_len, tokens, record.input_len, record.idempotency_key, record.digest]
