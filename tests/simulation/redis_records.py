"""What a Redis has taken of the session log, in order, read from the model without its clients. Every answer is
compared with it.

Changes whose answer was lost are seen too. Each change is checked when it is made: was its client allowed to make it?
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controllers.records import LedgerEntry
from controllers.session_log.log_cipher import LogCipher
from controllers.session_log.redis_histories import RedisHistories
from controllers.session_log.redis_log import Command
from controllers.tokens import unpack_tokens
from tests.simulation.network import Party
from tests.simulation.records import UNKNOWN, Committed, Life, LogListener
from tests.simulation.redis_model import RedisModel


@dataclass(frozen=True, slots=True)
class Stored:
    """A session's record in Redis, as far as it is checked. `last` has the last turn's start, number of tokens and
    number of input tokens."""

    entry: LedgerEntry
    writer: str
    last: tuple[int, int, int] | None

    @property
    def epoch(self) -> int:
        return self.entry.epoch

    @property
    def turns(self) -> int:
        return self.entry.turns


class Behind:
    """The log, read directly from the model."""

    def __init__(self, model: RedisModel, prefix: str) -> None:
        self._model = model
        self._prefix = prefix

    def key(self, *parts: str) -> str:
        return self._prefix + ":".join(parts)

    def read(self, *commands: Command) -> list[Any]:
        return [self._model.execute([_word(word) for word in command]) for command in commands]


class RedisRecords:
    """`wrong` is told of changes that were not allowed. `name` is the log's name; `clock` returns virtual seconds."""

    def __init__(
        self,
        model: RedisModel,
        name: str,
        clock: Callable[[], float],
        wrong: Callable[[str], None],
    ) -> None:
        self.lives: list[Life] = []
        self.living: dict[str, Life] = {}
        self._model = model
        self._prefix = f"kedge:{{{name}}}:"
        self._histories = RedisHistories(Behind(model, self._prefix), LogCipher())
        self.listeners: list[LogListener] = []
        self._clock = clock
        self._wrong = wrong
        self._stored: dict[str, Stored] = {}
        self._former_epochs: dict[str, int] = {}
        self._writers: dict[bytes, bytes] = {}
        self._cluster_of: dict[Party, str] = {}
        self._last_to_open: dict[str, Party] = {}

    def heard(self, keys: tuple[bytes, ...], client: Party) -> None:
        for key in keys:
            kind, _, name = key.decode().removeprefix(self._prefix).partition(":")
            if kind == "writers":
                self._opened(client)
            elif kind == "session":
                self._changed(name, client)

    def contents(self, session_id: str) -> tuple[tuple[int, ...], int]:
        """The session's tokens and the number of its turns."""
        stored = self._stored[session_id]
        return self._history(stored), stored.turns

    def _opened(self, client: Party) -> None:
        found = dict(self._model.execute([b"HGETALL", f"{self._prefix}writers".encode()]))
        for cluster in found:
            if found[cluster] != self._writers.get(cluster):
                self._cluster_of[client] = cluster.decode()
                self._last_to_open[cluster.decode()] = client
        self._writers = found

    def _changed(self, session_id: str, client: Party) -> None:
        cluster = self._cluster_of.get(client, "")
        if self._last_to_open.get(cluster) is not client:
            self._wrong(f"{session_id}: changed by {client.name}, which another controller has followed")
        before, after = self._stored.pop(session_id, None), self._read(session_id)
        if after is None:
            if before is not None:
                self._former_epochs[session_id] = before.epoch
                life = self.living.pop(session_id)
                life.closed_s = self._clock()
                for listener in self.listeners:
                    listener.closed(life)
            return
        self._stored[session_id] = after
        if before is None:
            self._begin(session_id, after)
        else:
            self._check_writer(session_id, before, after, cluster)
            self._check_turns(session_id, before, after)
            if after.epoch != before.epoch:
                for listener in self.listeners:
                    listener.moved(self.living[session_id], after.entry.replica_id)

    def _begin(self, session_id: str, stored: Stored) -> None:
        if stored.epoch <= self._former_epochs.get(session_id, 0):
            self._wrong(f"{session_id}: opened at epoch {stored.epoch}, which its namesake had")
        life = Life(session_id, self._clock(), self._history(stored), open_key=stored.entry.open_key)
        self.lives.append(life)
        self.living[session_id] = life
        for listener in self.listeners:
            listener.opened(life, stored.entry.replica_id, UNKNOWN)

    def _check_writer(self, session_id: str, before: Stored, after: Stored, cluster: str) -> None:
        claimed = before.writer != after.writer
        if after.writer != cluster:
            self._wrong(f"{session_id}: changed by {cluster}, and it is {after.writer}'s")
        if after.epoch - before.epoch not in ((1,) if claimed else (0, 1)):
            self._wrong(f"{session_id}: went from {before} to {after}")

    def _check_turns(self, session_id: str, before: Stored, after: Stored) -> None:
        if after.turns == before.turns:
            return
        life = self.living[session_id]
        if after.turns != before.turns + 1 or after.epoch != before.epoch or after.last is None:
            self._wrong(f"{session_id}: went from {before} to {after}")
            return
        (start, count, input_len), history = after.last, life.history()
        tokens = self._history(after)[start : start + count]
        turn = Committed(
            session_id=session_id,
            turn_index=before.turns,
            rewound=start < len(history),
            before=history[:start],
            input=tokens[:input_len],
            output=tokens[input_len:],
        )
        life.turns.append(turn)
        for listener in self.listeners:
            listener.committed(life, turn)

    def _read(self, session_id: str) -> Stored | None:
        text = self._model.get(f"{self._prefix}session:{session_id}".encode())
        if text is None:
            return None
        fields = json.loads(text)
        last = fields["last"]
        return Stored(
            entry=LedgerEntry(**fields["entry"]),
            writer=fields["writer"],
            last=None if last is None else (last[0], last[1], last[2]),
        )

    def _history(self, stored: Stored) -> tuple[int, ...]:
        return tuple(unpack_tokens(self._histories.read(stored.entry)))


def _word(word: str | bytes | int | float) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()
