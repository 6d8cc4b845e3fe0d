"""Each store agrees with a model in memory, whatever turns, rewinds, moves, retries and crashes come."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from redis_server import CLUSTER, RedisServer
from store_turns import append_turn

from controllers.errors import StaleEpoch
from controllers.records import Checkpoint, SessionRecord, StoredResult, TurnNote, TurnRecord
from controllers.session_log.kept_answers import KEPT_ANSWERS
from controllers.session_log.log_cipher import KEY_BYTES, LogCipher
from controllers.session_log.redis_store import RedisSessionStore
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.session_log.store import SessionStore
from controllers.tokens import encode_tokens, unpack_tokens

SETTINGS = settings(max_examples=24, stateful_step_count=30, deadline=None, print_blob=True)
KEYED = st.sampled_from([None, "key", "call-", "try-"])
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)


def _key(kind: str | None, turns: int) -> str | None:
    """The key of a client (`key`), or one as front ends make them."""
    return None if kind is None else f"{kind}{turns:032x}"


class Place(Protocol):
    """A place where a log is kept, encrypted or not."""

    def open(self) -> SessionStore: ...

    def take_over(self) -> SessionStore:
        """Opens the log as a process leaves it that was just killed."""

    def histories(self, store: SessionStore) -> int:
        """How many turns, segments and notes the log has, of all sessions together."""

    def remove(self) -> None: ...


class Files:
    def __init__(self, cipher: LogCipher) -> None:
        self._cipher = cipher
        self._folder = Path(tempfile.mkdtemp())
        self._generation = 0

    def _path(self) -> Path:
        return self._folder / str(self._generation) / "sessions.db"

    def open(self) -> SessionStore:
        return SqliteSessionStore(self._path(), cipher=self._cipher)

    def take_over(self) -> SessionStore:
        before = self._path().parent
        self._generation += 1
        shutil.copytree(before, self._path().parent)
        return self.open()

    def histories(self, store: SessionStore) -> int:
        assert isinstance(store, SqliteSessionStore)
        tables = ("turns", "segments", "notes")
        counts = f"SELECT {' + '.join(f'(SELECT count(*) FROM {table})' for table in tables)}"
        return int(store._connection.execute(counts).fetchone()[0])

    def remove(self) -> None:
        shutil.rmtree(self._folder)


class Keys:
    def __init__(self, server: RedisServer, cipher: LogCipher) -> None:
        self._server = server
        self._log = server.log()
        self._cipher = cipher

    def open(self) -> SessionStore:
        return RedisSessionStore(self._log, CLUSTER, cipher=self._cipher)

    def take_over(self) -> SessionStore:
        return self.open()

    def histories(self, store: SessionStore) -> int:  # noqa: ARG002
        kinds = ("history", "turns", "segment", "tokens", "uses", "notes")
        with self._server.client() as client:
            return sum(len(client.keys(f"kedge:{{{self._log.name}}}:{kind}:*")) for kind in kinds)

    def remove(self) -> None:
        pass


@dataclass
class ModelSession:
    epoch: int = 1
    replica_id: str = "r1"
    turns: int = 0
    history: list[int] = field(default_factory=list)
    results: list[StoredResult] = field(default_factory=list)
    notes: list[TurnNote] = field(default_factory=list)
    last_turn: TurnRecord | None = None

    def take(self, record: TurnRecord) -> None:
        if record.start_len < len(self.history):
            whole = {note.turn_index for note in self.notes if note.end_len <= record.start_len}
            self.results = [
                kept if kept.turn_index in whole else replace(kept, result=b"") for kept in self.results
            ]
        self.history = self.history[: record.start_len] + unpack_tokens(record.tokens).tolist()
        self.notes = cut(self.notes, record.start_len)
        if record.note:
            start_len, end_len = record.start_len, len(self.history)
            asked_len = start_len + record.input_len
            self.notes.append(
                TurnNote(
                    self.turns,
                    start_len,
                    asked_len,
                    end_len,
                    record.checkpoint,
                    record.whole,
                    record.note,
                    record.opening_len,
                )
            )
        if record.idempotency_key is not None:
            self.results.append(StoredResult(record.idempotency_key, self.turns, record.result))
        self.turns += 1
        self.last_turn = record

    def kept(self) -> list[StoredResult]:
        """The last answers under keys of clients, and the last of the others."""
        by_client = [result for result in self.results if result.idempotency_key.startswith("key")]
        others = [result for result in self.results if result not in by_client]
        kept = by_client[-KEPT_ANSWERS:] + others[-KEPT_ANSWERS:]
        ends = {note.turn_index: note.end_len for note in self.notes}
        kept = [replace(result, end_len=ends.get(result.turn_index)) for result in kept]
        return sorted(kept, key=lambda result: result.turn_index)


def cut(notes: list[TurnNote], length: int) -> list[TurnNote]:
    """The notes of turns whose input is within the first `length` tokens. What opens the answer may be cut off."""
    return [
        replace(
            note,
            end_len=min(note.end_len, length),
            checkpoint=note.checkpoint if note.asked_len <= length else None,
        )
        for note in notes
        if note.asked_len - note.opening_len <= length
    ]


CIPHERS = [LogCipher(), LogCipher([bytes(KEY_BYTES)], encrypts=True)]


class StoreMachine(RuleBasedStateMachine):
    new_place: Callable[[LogCipher], Place]
    sessions = Bundle("sessions")

    @initialize(cipher=st.sampled_from(CIPHERS))
    def begin(self, cipher: LogCipher) -> None:
        self.place = self.new_place(cipher)
        self.store = self.place.open()
        self.model: dict[str, ModelSession] = {}
        self.opened = 0
        self.floor = 0

    @rule(target=sessions)
    def open(self) -> str:
        self.opened += 1
        session_id = f"s{self.opened}"
        opened = self.store.open(SessionRecord(session_id, "", 1, "r1"))
        assert opened.epoch == self.floor + 1
        self.model[session_id] = ModelSession(opened.epoch)
        return session_id

    @rule(
        session_id=sessions,
        tokens=TOKENS,
        keep=st.floats(0, 1),
        rewinds=st.booleans(),
        keyed=KEYED,
        note=st.binary(max_size=9),
        whole=st.booleans(),
        input_len=st.integers(1, 3),
        opening_len=st.integers(0, 3),
    )
    def turn(
        self,
        session_id: str,
        tokens: list[int],
        keep: float,
        rewinds: bool,
        keyed: str | None,
        note: bytes,
        whole: bool,
        input_len: int,
        opening_len: int,
    ) -> None:
        session = self.model[session_id]
        start_len = int(len(session.history) * keep) if rewinds else len(session.history)
        key = _key(keyed, session.turns)
        record = TurnRecord(
            session_id, session.epoch, session.turns, start_len, encode_tokens(tokens), 1, key, b"result"
        )
        if note:
            record = replace(record, input_len=min(input_len, len(tokens)))
            place = Checkpoint(session.turns, note, record.asked_len, "template") if whole else None
            opening_len = min(opening_len, record.input_len)
            record = replace(record, note=note, whole=whole, checkpoint=place, opening_len=opening_len)
        append_turn(self.store, record)
        session.take(record)

    @rule(session_id=sessions, places=st.data())
    def forget_a_note(self, session_id: str, places: st.DataObject) -> None:
        session = self.model[session_id]
        at = places.draw(st.integers(-1, len(session.notes)))
        if not 0 <= at < len(session.notes):
            self.store.forget_note(session_id, 10_000)
            return
        self.store.forget_note(session_id, session.notes[at].turn_index)
        note = session.notes[at] = replace(session.notes[at], note=b"")
        session.results = [
            replace(kept, result=b"") if kept.turn_index == note.turn_index else kept
            for kept in session.results
        ]

    @rule(asked=st.lists(st.tuples(sessions, TOKENS, st.integers(-1, 1), KEYED), max_size=6))
    def turns_in_a_group(self, asked: list[tuple[str, list[int], int, str | None]]) -> None:
        """Each turn continues the session as the turns before it in the group leave it, or its number is too low or too
        high."""
        group, follow = [], []
        for session_id, tokens, off, keyed in asked:
            session = self.model[session_id]
            key = _key(keyed, session.turns)
            turn_index, start_len = session.turns + off, len(session.history)
            record = TurnRecord(
                session_id, session.epoch, turn_index, start_len, encode_tokens(tokens), 1, key, b"result"
            )
            group.append(record)
            follow.append(off == 0)
            if off == 0:
                session.take(record)
        told = [outcome is None for outcome in self.store.append_turns(group)]
        assert told == follow

    @rule(target=sessions, parent=sessions, keep=st.floats(0, 1))
    def fork(self, parent: str, keep: float) -> str:
        self.opened += 1
        session_id = f"s{self.opened}"
        before = self.model[parent]
        history = before.history
        length = int(len(history) * keep)
        forked = self.store.fork(parent, length, SessionRecord(session_id, "", 1, "r1"))
        assert forked.epoch == self.floor + 1
        notes = [
            replace(note, turn_index=note.turn_index - before.turns) for note in cut(before.notes, length)
        ]
        self.model[session_id] = ModelSession(forked.epoch, history=history[:length], notes=notes)
        return session_id

    @rule(session_id=sessions)
    def retry_last_turn(self, session_id: str) -> None:
        session = self.model[session_id]
        if session.last_turn is None:
            return
        if session.last_turn.epoch == session.epoch:
            append_turn(self.store, session.last_turn)
        else:
            with pytest.raises(StaleEpoch):
                append_turn(self.store, session.last_turn)

    @rule(session_id=sessions, behind=st.integers(1, 3), tokens=TOKENS)
    def stale_turn(self, session_id: str, behind: int, tokens: list[int]) -> None:
        session = self.model[session_id]
        record = TurnRecord(session_id, session.epoch - behind, session.turns, 0, encode_tokens(tokens), 0)
        with pytest.raises(StaleEpoch):
            append_turn(self.store, record)

    @rule(session_id=sessions, replica_id=st.sampled_from(["r1", "r2", "r3"]))
    def move(self, session_id: str, replica_id: str) -> None:
        session = self.model[session_id]
        session.epoch += 1
        session.replica_id = replica_id
        self.store.assign(session_id, replica_id, session.epoch)

    @rule(session_id=consumes(sessions))
    def close(self, session_id: str) -> None:
        assert self.store.close(session_id)
        self.floor = max(self.floor, self.model.pop(session_id).epoch)

    @rule()
    def reopen(self) -> None:
        self.store.disconnect()
        self.store = self.place.open()

    @rule()
    def crash(self) -> None:
        former, self.store = self.store, self.place.take_over()
        former.disconnect()

    @invariant()
    def store_equals_model(self) -> None:
        entries = {entry.session_id: entry for entry in list(self.store.load_all_entries())}
        assert entries.keys() == self.model.keys()
        for session_id, session in self.model.items():
            record = self.store.load(session_id)
            assert unpack_tokens(record.history).tolist() == session.history
            assert (record.epoch, record.replica_id) == (session.epoch, session.replica_id)
            assert record.turns == session.turns
            assert list(record.results) == session.kept()
            assert list(self.store.notes(session_id)) == session.notes
            after = session.notes[len(session.notes) // 2].turn_index if session.notes else None
            behind = [each for each in session.notes if after is not None and each.turn_index > after]
            assert list(self.store.notes_after(session_id, after, 10**6)) == behind
            assert list(self.store.notes_after(session_id, None, 0)) == session.notes[:1]
            assert list(record.checkpoints) == [each.checkpoint for each in session.notes if each.checkpoint]
            assert record.whole == any(each.whole for each in session.notes)
            entry = entries[session_id]
            assert (entry.tokens, entry.turns) == (len(session.history), session.turns)

    def teardown(self) -> None:
        for session_id in self.model:
            assert self.store.close(session_id)
        assert self.place.histories(self.store) == 0
        self.store.disconnect()
        self.place.remove()


def check(place: Callable[[LogCipher], Place]) -> None:
    machine = type("Machine", (StoreMachine,), {"new_place": staticmethod(place)})
    run_state_machine_as_test(machine, settings=SETTINGS)


def test_sqlite_store_against_the_model() -> None:
    check(Files)


def test_redis_store_against_the_model(redis_server: RedisServer) -> None:
    check(lambda cipher: Keys(redis_server, cipher))
