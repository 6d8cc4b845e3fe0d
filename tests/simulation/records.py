"""What the session log has taken, in order. Every answer is compared with it.

The recorder wraps the real store, passes every call on, and can pretend that the log is away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from controllers.errors import ControllerError, StoreError
from controllers.records import LedgerEntry, SessionRecord, TurnRecord
from controllers.session_log.store import SessionStore
from controllers.tokens import unpack_tokens


@dataclass(slots=True)
class Committed:
    """One turn that the log took. `before` is the history that it continued, cut to the turn's start."""

    session_id: str
    turn_index: int
    rewound: bool
    before: tuple[int, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def after(self) -> tuple[int, ...]:
        return (*self.before, *self.input, *self.output)


@dataclass(slots=True)
class Life:
    """A session from its opening to its close. A later session of the same name is another life."""

    session_id: str
    opened_s: float = 0.0
    inherited: tuple[int, ...] = ()
    turns: list[Committed] = field(default_factory=list)
    closed_s: float | None = None
    open_key: str | None = None

    @property
    def closed(self) -> bool:
        return self.closed_s is not None

    def history(self, turns: int | None = None) -> tuple[int, ...]:
        """The history after the first `turns` turns (None: after all)."""
        taken = self.turns if turns is None else self.turns[:turns]
        return taken[-1].after if taken else self.inherited


UNKNOWN = "?"


class LogListener:
    """Is told at once what the log has taken."""

    def opened(self, life: Life, replica_id: str, parent_id: str | None) -> None:
        """A session begins at a replica. `parent_id` is the parent if it is a fork, or UNKNOWN if it may be one."""

    def committed(self, life: Life, turn: Committed) -> None:
        """The log has taken a new turn."""

    def moved(self, life: Life, replica_id: str) -> None:
        """A session has another owner, or the same owner at another epoch."""

    def closed(self, life: Life) -> None:
        """The session has ended."""


class RecordedStore:
    """A SessionStore that passes calls on to a real one. `clock` returns virtual seconds. The owner adds
    `listeners`."""

    def __init__(self, store: SessionStore, clock: Callable[[], float]) -> None:
        self.listeners: list[LogListener] = []
        self.lives: list[Life] = []
        self.living: dict[str, Life] = {}
        self.away = 0
        """The number of current outages."""
        self._store = store
        self._clock = clock

    def open(self, record: SessionRecord) -> SessionRecord:
        opened: SessionRecord = self._change(self._store.open, record)
        self._begin(Life(record.session_id, self._clock(), open_key=record.open_key), opened.replica_id, None)
        return opened

    def fork(self, parent_id: str, length: int, record: SessionRecord) -> LedgerEntry:
        forked: LedgerEntry = self._change(self._store.fork, parent_id, length, record)
        inherited = self.living[parent_id].history()[:length]
        life = Life(record.session_id, self._clock(), inherited, open_key=record.open_key)
        self._begin(life, forked.replica_id, parent_id)
        return forked

    def append_turns(self, records: Sequence[TurnRecord]) -> Sequence[ControllerError | None]:
        outcomes: Sequence[ControllerError | None] = self._change(self._store.append_turns, records)
        for record, refusal in zip(records, outcomes, strict=True):
            if refusal is None:
                self._taken(record)
        return outcomes

    def close(self, session_id: str) -> bool:
        known: bool = self._change(self._store.close, session_id)
        if known:
            life = self.living.pop(session_id)
            life.closed_s = self._clock()
            for listener in self.listeners:
                listener.closed(life)
        return known

    def assign(self, session_id: str, replica_id: str, epoch: int) -> None:
        self._refuse_if_away()
        repeated = self._store.find(session_id).epoch == epoch
        self._store.assign(session_id, replica_id, epoch)
        if not repeated:
            for listener in self.listeners:
                listener.moved(self.living[session_id], replica_id)

    def touch(self, session_id: str, last_used_s: float) -> None:
        self._change(self._store.touch, session_id, last_used_s)

    def __getattr__(self, name: str) -> Any:
        """The methods of the real store that only read."""
        method = getattr(self._store, name)

        def read(*args: Any) -> Any:
            self._refuse_if_away()
            return method(*args)

        return read

    def _taken(self, record: TurnRecord) -> None:
        life = self.living[record.session_id]
        if record.turn_index < len(life.turns):
            return  # a repetition
        tokens, history = unpack_tokens(record.tokens).tolist(), life.history()
        turn = Committed(
            session_id=record.session_id,
            turn_index=record.turn_index,
            rewound=record.start_len < len(history),
            before=history[: record.start_len],
            input=tuple(tokens[: record.input_len]),
            output=tuple(tokens[record.input_len :]),
        )
        life.turns.append(turn)
        for listener in self.listeners:
            listener.committed(life, turn)

    def _change(self, change: Callable[..., Any], *args: Any) -> Any:
        self._refuse_if_away()
        return change(*args)

    def _refuse_if_away(self) -> None:
        if self.away:
            raise StoreError("the log does not answer")

    def _begin(self, life: Life, replica_id: str, parent_id: str | None) -> None:
        self.lives.append(life)
        self.living[life.session_id] = life
        for listener in self.listeners:
            listener.opened(life, replica_id, parent_id)
