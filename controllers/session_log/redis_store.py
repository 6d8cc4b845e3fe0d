"""RedisSessionStore: the session log in Redis, for clusters whose log must outlive the controller's machine.

A session has

- `session`, a string: all but its tokens and results, as JSON (redis_session.py);
- its tokens, see redis_histories.py;
- `results`, a hash: the answers of turns with an idempotency key, see redis_answers.py;
- `notes`, a hash: what turns said, see redis_notes.py.

The log also has `sessions`, the set of all ids, and `epoch_floor`, the highest epoch of any closed session. A cluster
has `alive`, which exists while the cluster lives, the keys of redis_cluster_facts.py, and `taken`, a hash: the sessions
that others took from it, and at which epochs.

Several clusters may write to one log, each to its own sessions. A session names the cluster that opened or claimed it
last. A change is made only if the session is still as it was read, so a cluster that has lost the session in between
changes nothing. If the log is encrypted, `session`, tokens, results, notes and the link secret are; ids, lengths and
the rest are not.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from controllers.errors import ControllerError, SessionTakenOver, StoreError
from controllers.records import (
    LedgerEntry,
    SessionRecord,
    TurnNote,
    TurnRecord,
)
from controllers.session_keys import id_in, named, session_key, tenant_in
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
from controllers.session_log.redis_answers import RedisAnswers
from controllers.session_log.redis_cluster_facts import ClusterFacts
from controllers.session_log.redis_connection import Connect, connect_redis
from controllers.session_log.redis_histories import RedisHistories
from controllers.session_log.redis_log import ALIVE_S, FIELDS_AT_ONCE, Command, Guards, RedisLog
from controllers.session_log.redis_notes import RedisNotes
from controllers.session_log.redis_session import StoredSession
from controllers.session_log.store import LogChanges
from controllers.settings import RedisLogSettings
from controllers.tokens import TOKEN_BYTES

logger = logging.getLogger(__name__)

ENTRIES_AT_ONCE = 1000
SWEPT_AT_ONCE = 100
"""How many sessions of the whole log one call of `changes` looks at. So its cost does not depend on their number."""

TAKEN_KEPT_S = 3600
"""How long the log keeps what was taken from a cluster. A cluster that has not asked for so long does not come back."""

MOST_TRIES = 5
"""How often a change is tried when guards fail, for example because an answer was lost or a session was taken over."""


class RedisSessionStore:
    """A SessionStore in Redis. For `cluster` and StoreError see RedisLog. `clock` returns Unix time and `timer`
    monotonic time, in seconds.

    The configuration of Redis determines what survives a failure of Redis itself.
    """

    def __init__(
        self,
        settings: RedisLogSettings,
        cluster: str,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        connect: Connect = connect_redis,
        open_patience_s: float = 0.0,
        cipher: LogCipher | None = None,
    ) -> None:
        self._cipher = cipher or LogCipher()
        self._log = RedisLog(settings, cluster, timer, connect, open_patience_s=open_patience_s)
        self._histories = RedisHistories(self._log, self._cipher)
        self._notes = RedisNotes(self._log, self._cipher)
        self._answers = RedisAnswers(self._log, self._cipher)
        self._clock = clock
        self._facts = ClusterFacts(self._log, self._cipher)
        self._cursor = 0  # of the walk over all sessions that `changes` continues
        self._told: dict[bytes, bytes] = {}  # what others took, as the last call of `changes` returned it
        self._unreadable: set[str] = set()  # sessions of which the controller's log has told

    def open(self, record: SessionRecord, notes: Sequence[TurnNote] = ()) -> SessionRecord:
        assert not record.turns
        begun = self._histories.begun(record.session_id, record.history)
        begun += self._notes.added(record.session_id, notes)
        return self._add(lambda: (record, record.num_tokens, begun, {}))[0]

    def fork(self, parent_id: str, length: int, record: SessionRecord) -> LedgerEntry:
        def child() -> tuple[SessionRecord, int, list[Command], Guards]:
            parent, text = self._own(parent_id)
            check_fork(parent.entry.tokens, length)
            forked = replace(record, tools=parent.tools, model=parent.model)
            commands, guards = self._histories.forked(parent.entry, record.session_id, length)
            said = self._notes.forked(parent.entry, self._notes.read(parent.entry), record.session_id, length)
            return forked, length, [*commands, *said], {**guards, self._key(parent_id): text}

        return self._add(child)[1]

    def assign(self, session_id: str, replica_id: str, epoch: int) -> None:
        def assigned(session: StoredSession) -> list[Command]:
            if not changes_owner(session.entry, replica_id, epoch):
                return []
            return [self._set_entry(session, replica_id=replica_id, epoch=epoch)]

        self._change(session_id, assigned)

    def append_turns(self, records: Sequence[TurnRecord]) -> list[ControllerError | None]:
        """Two round trips for all turns, if no two are of the same session. Turns of one session are appended one after
        the other."""
        outcomes: dict[int, ControllerError | None] = {}
        for turns in _once_each(records):
            left = turns
            try:
                for _ in range(MOST_TRIES):
                    left = self._append(left, outcomes)
                busy = {at: self._busy(record.session_id) for at, record in left.items()}
            except StoreError as error:
                busy = dict.fromkeys(left.keys() - outcomes.keys(), error)
            outcomes.update(busy)
        return [outcomes[at] for at in range(len(records))]

    def load(self, session_id: str) -> SessionRecord:
        found, results, notes, former, turns = self._log.read(
            ("GET", self._key(session_id)),
            self._answers.reads(session_id),
            self._notes.reads(session_id),
            *self._histories.reads(session_id),
        )
        session = self._checked(session_id, found)
        tokens = self._histories.history(session.entry, former, turns)
        said = self._notes.notes(session.entry, notes)
        kept = self._answers.kept(session, results, {note.turn_index: note.end_len for note in said})
        return session.entry.record(tokens, kept, session.tools, session.model, said)

    def notes(self, session_id: str) -> list[TurnNote]:
        return self._notes.read(self._own(session_id)[0].entry)

    def notes_after(self, session_id: str, turn_index: int | None, room: int) -> list[TurnNote]:
        return self._notes.page(self._own(session_id)[0].entry, turn_index, room)

    def forget_note(self, session_id: str, turn_index: int) -> None:
        def forgotten(session: StoredSession) -> list[Command]:
            answer = self._answers.forgotten(session, turn_index)
            return [*self._notes.forgotten(session_id, turn_index), *answer]

        self._change(session_id, forgotten)

    def find(self, session_id: str) -> LedgerEntry:
        return self._any(session_id)[0].entry

    def claim(self, session_id: str, replica_id: str) -> LedgerEntry:
        for _ in range(MOST_TRIES):
            session, text = self._any(session_id)
            if session.writer == self._log.cluster:
                return session.entry
            entry = replace(
                session.entry,
                replica_id=replica_id,
                epoch=session.entry.epoch + 1,
                last_used_s=self._clock(),
            )
            commands = [self._set(replace(session, entry=entry, writer=self._log.cluster))]
            if session.writer:
                taken = self._log.key("taken", session.writer)
                commands += [("HSET", taken, session_id, entry.epoch), ("EXPIRE", taken, TAKEN_KEPT_S)]
            if self._log.change(commands, {self._key(session_id): text}, though_full=True):
                return entry
        raise self._busy(session_id)

    def changes(self) -> LogChanges:
        taken_key = self._log.key("taken", self._log.cluster)
        taken, (cursor, members) = self._log.read(
            ("HGETALL", taken_key),
            ("SSCAN", self._log.key("sessions"), self._cursor, "COUNT", SWEPT_AT_ONCE),
        )
        commands: list[Command] = [
            ("SET", self._log.alive_key(self._log.cluster), 1, "EX", ALIVE_S),
            *self._facts.kept(),
        ]
        told = [key for key, epoch in taken.items() if self._told.get(key) == epoch]
        commands += [
            ("HDEL", taken_key, *told[at : at + FIELDS_AT_ONCE]) for at in range(0, len(told), FIELDS_AT_ONCE)
        ]
        self._log.change(commands, though_full=True)
        claimable = self._claimable([member.decode() for member in members])
        self._cursor, self._told = int(cursor), taken
        return LogChanges(tuple((key.decode(), int(epoch)) for key, epoch in taken.items()), claimable)

    def load_all_entries(self) -> Iterator[LedgerEntry]:
        (members,) = self._log.read(("SMEMBERS", self._log.key("sessions")))
        for session in self._sessions(sorted(member.decode() for member in members)):
            entry = session.entry
            if session.writer == self._log.cluster:
                renamed = tenant_in(entry.session_id) != entry.tenant
                yield self.find(session_key(entry.tenant, entry.session_id)) if renamed else entry

    def touch(self, session_id: str, last_used_s: float) -> None:
        self._change(session_id, lambda session: [self._set_entry(session, last_used_s=last_used_s)])

    def close(self, session_id: str) -> bool:
        floor_key = self._log.key("epoch_floor")
        for tries in range(MOST_TRIES):
            found, floor = self._log.read(("GET", self._key(session_id)), ("GET", floor_key))
            if found is None:
                return tries > 0  # an earlier try has closed it, and its answer was lost
            session = self._checked(session_id, found)
            gone, guards = self._histories.closed(session_id)
            commands: list[Command] = [
                ("SET", floor_key, max(int(floor or 0), session.entry.epoch)),
                ("SREM", self._log.key("sessions"), session_id),
                ("DEL", self._key(session_id)),
                self._answers.closed(session_id),
                self._notes.closed(session_id),
                *gone,
            ]
            guards = {**guards, self._key(session_id): found, floor_key: floor}
            if self._log.change(commands, guards, though_full=True):
                return True
        raise self._busy(session_id)

    def close_after(self, session_id: str, turn_key: str) -> None:
        self._change(session_id, lambda session: [self._set_entry(session, closes_after=turn_key)])

    def purge(self) -> None:
        """Does nothing: Redis itself removes deleted data from its files."""

    def deployment(self) -> str | None:
        return self._facts.deployment()

    def set_deployment(self, text: str) -> None:
        self._facts.set_deployment(text)

    def link_secret(self, new: bytes) -> bytes:
        return self._facts.link_secret(new)

    def disconnect(self) -> None:
        self._log.close()

    def _key(self, session_id: str) -> str:
        return self._log.key("session", session_id)

    def _any(self, session_id: str) -> tuple[StoredSession, bytes]:
        """The session, whichever cluster writes it, and its text in the log."""
        (found,) = self._log.read(("GET", self._key(session_id)))
        if found is None:
            found = self._brought_under_its_key(session_id)
        if found is None:
            raise not_found(session_id)
        return self._parsed(session_id, found), found

    def _own(self, session_id: str) -> tuple[StoredSession, bytes]:
        (found,) = self._log.read(("GET", self._key(session_id)))
        return self._checked(session_id, found), found

    def _checked(self, session_id: str, found: bytes | None) -> StoredSession:
        """The parsed session. Raises SessionNotFound and SessionTakenOver."""
        if found is None:
            raise not_found(session_id)
        session = self._parsed(session_id, found)
        if session.writer != self._log.cluster:
            raise SessionTakenOver(f"{named(session_id)} has been taken over by another cluster")
        return session

    def _change(self, session_id: str, changed: Callable[[StoredSession], list[Command]]) -> None:
        """Runs the commands that `changed` returns for the session. No commands: the change is already made."""
        for _ in range(MOST_TRIES):
            session, text = self._own(session_id)
            commands = changed(session)
            if not commands:
                return self._log.confirm()
            if self._log.change(commands, {self._key(session_id): text}, though_full=True):
                return None
        raise self._busy(session_id)

    def _busy(self, session_id: str) -> StoreError:
        return self._log.error(f"{named(session_id)} was changed by others at each of {MOST_TRIES} tries")

    def _same_open(self, there: StoredSession, record: SessionRecord, tokens: int) -> bool:
        """Whether an earlier call, which got no answer, has added this session."""
        entry = there.entry
        return (
            record.open_key is not None
            and (there.writer, entry.open_key) == (self._log.cluster, record.open_key)
            and (entry.tokens, entry.turns) == (tokens, 0)
        )

    def _add(
        self, made: Callable[[], tuple[SessionRecord, int, list[Command], Guards]]
    ) -> tuple[SessionRecord, LedgerEntry]:
        """Adds the session that `made` returns, at an epoch above those of all closed sessions. `made` also returns its
        number of tokens, further commands, and guards. A session that an earlier call with the same `open_key` added is
        returned as it is. Raises SessionExists."""
        added = b""
        for _ in range(MOST_TRIES):
            record, tokens, commands, guards = made()
            session_id = record.session_id
            key, floor_key = self._key(session_id), self._log.key("epoch_floor")
            found, floor = self._log.read(("GET", key), ("GET", floor_key))
            if found is not None:
                there = self._parsed(session_id, found)
                if found != added and not self._same_open(there, record, tokens):
                    raise exists(session_id)
                self._log.confirm()  # an earlier try has added it, and its answer was lost
                entry = there.entry
                return replace(record, epoch=entry.epoch, replica_id=entry.replica_id), entry
            record = replace(record, epoch=max(record.epoch, int(floor or 0) + 1))
            entry = replace(LedgerEntry.of(record, self._clock()), tokens=tokens)
            session = StoredSession(entry, record.tools, model=record.model, writer=self._log.cluster)
            added = self._text(session)
            change: list[Command] = [
                ("SET", key, added),  # first, so that a Redis that is full refuses it
                ("SADD", self._log.key("sessions"), session_id),
                self._histories.opened(session_id),
                self._notes.opened(session_id),
                *commands,
            ]
            if self._log.change(change, {**guards, key: None, floor_key: floor}):
                return record, entry
        raise self._busy(record.session_id)

    def _append(
        self, turns: dict[int, TurnRecord], outcomes: dict[int, ControllerError | None]
    ) -> dict[int, TurnRecord]:
        """Appends turns, each of another session, and notes their outcomes. Returns the turns whose guards failed.
        After a StoreError the log may or may not hold the turns without an outcome."""
        if not turns:
            return turns
        texts = self._log.read(*(("GET", self._key(record.session_id)) for record in turns.values()))
        changes: dict[int, tuple[list[Command], Guards]] = {}
        repeated: dict[int, ControllerError | None] = {}
        for (at, record), text in zip(turns.items(), texts, strict=True):
            try:
                session = self._checked(record.session_id, text)
                if adds_turn(session.entry, record, partial(self._is_last, session, record)):
                    commands, guards = self._appended(session, record)
                    changes[at] = commands, {**guards, self._key(record.session_id): text}
                else:
                    repeated[at] = None
            except ControllerError as refusal:
                outcomes[at] = refusal
        made = self._log.change_each(list(changes.values())) if changes else []
        if repeated:
            self._log.confirm()
        outcomes.update(repeated)
        outcomes.update({at: None for at, done in zip(changes, made, strict=True) if done})
        return {at: turns[at] for at, done in zip(changes, made, strict=True) if not done}

    def _appended(self, session: StoredSession, record: TurnRecord) -> tuple[list[Command], Guards]:
        assert len(record.tokens) % TOKEN_BYTES == 0
        commands, guards = self._histories.appended(session.entry, record)
        if record.start_len < session.entry.tokens:
            ends = self._notes.ends(record.session_id, [index for index, _, _ in session.kept])
            commands += self._answers.cut(session, record.start_len, ends)
            commands += self._notes.cut(session.entry, record.start_len)
        commands += self._notes.appended(record)
        entry = replace(
            session.entry,
            tokens=record.end_len,
            turns=record.turn_index + 1,
            last_used_s=self._clock(),
        )
        session = replace(session, entry=entry, last=identity(record), **set_by(record))
        session, answer = self._answers.appended(session, record)
        return [*commands, *answer, self._set(session)], guards

    def _sessions(self, session_ids: list[str]) -> Iterator[StoredSession]:
        """The sessions with these ids, except those that have been closed meanwhile. One that cannot be read, for
        example because its key is gone, is passed over: it must keep neither a controller from starting nor other
        sessions from ending."""
        for start in range(0, len(session_ids), ENTRIES_AT_ONCE):
            some = session_ids[start : start + ENTRIES_AT_ONCE]
            (texts,) = self._log.read(("MGET", *map(self._key, some)))
            for session_id, text in zip(some, texts, strict=True):
                if (
                    text is None
                    and not self._log.read(("SISMEMBER", self._log.key("sessions"), session_id))[0]
                ):
                    continue
                try:
                    session = self._parsed(session_id, text)
                except StoreError as error:
                    if session_id not in self._unreadable:
                        logger.error("%s is passed over: %s", named(session_id), error)
                    self._unreadable.add(session_id)
                else:
                    yield session

    def _brought_under_its_key(self, key: str) -> bytes | None:
        """Renames a session that an earlier version stored under the client's id instead of its key. Returns its text;
        None if there is none."""
        former = id_in(key)
        (found,) = self._log.read(("GET", self._key(former))) if former != key else (None,)
        session = None if found is None else self._parsed(former, found)
        if session is None or session.entry.tenant != tenant_in(key):
            return None
        renamed = replace(session, entry=replace(session.entry, session_id=key))
        text = self._text(renamed)
        members = self._log.key("sessions")
        history, former_history = self._log.key("history", key), self._log.key("history", former)
        commands: list[Command] = [
            ("COPY", former_history, history),
            *self._answers.renamed(former, key),
            ("SET", self._key(key), text),
            ("SADD", members, key),
            ("DEL", self._key(former), former_history),
            ("SREM", members, former),
        ]
        return text if self._log.change(commands, {self._key(former): found}) else None

    def _claimable(self, session_ids: list[str]) -> tuple[LedgerEntry, ...]:
        """Those of the sessions that no other living cluster has."""
        sessions = list(self._sessions(session_ids))
        others = sorted({session.writer for session in sessions} - {self._log.cluster})
        alive = (
            self._log.read(*(("EXISTS", self._log.alive_key(writer)) for writer in others)) if others else []
        )
        living = {writer for writer, lives in zip(others, alive, strict=True) if lives}
        return tuple(session.entry for session in sessions if session.writer not in living)

    def _parsed(self, session_id: str, stored: bytes | None) -> StoredSession:
        text = self._cipher.decrypt(stored or b"", _session_place(session_id))
        try:
            return StoredSession.parse(text)
        except (ValueError, TypeError, KeyError) as error:
            raise self._log.error("a session cannot be read", repr(error)) from error

    def _text(self, session: StoredSession) -> bytes:
        return self._cipher.encrypt(session.text(), _session_place(session.entry.session_id))

    def _set_entry(self, session: StoredSession, **changes: Any) -> Command:
        return self._set(replace(session, entry=replace(session.entry, **changes)))

    def _set(self, session: StoredSession) -> Command:
        return ("SET", self._key(session.entry.session_id), self._text(session))

    def _is_last(self, session: StoredSession, record: TurnRecord) -> bool:
        """True if the last turn is this record. Results are not compared: they are not part of the history."""
        if session.last != identity(record):
            return False
        return self._histories.read(session.entry)[record.start_len * TOKEN_BYTES :] == record.tokens


def _once_each(records: Sequence[TurnRecord]) -> list[dict[int, TurnRecord]]:
    """Splits the turns, by their position, into parts in which no session occurs twice: each turn of a session depends
    on the one before it."""
    parts: list[dict[int, TurnRecord]] = []
    seen: Counter[str] = Counter()
    for at, record in enumerate(records):
        nth = seen[record.session_id]
        seen[record.session_id] += 1
        if nth == len(parts):
            parts.append({})
        parts[nth][at] = record
    return parts


def _session_place(session_id: str) -> str:
    return f"session {session_id}"
