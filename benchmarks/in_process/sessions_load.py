"""Sessions and clients directly on an engine: each client runs turns over its sessions, one turn at a time.

Benchmarks that load an engine with sessions share this module. Clients run on the engine's own thread (the end of a
turn submits the next), so nothing but the engine is measured.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from engine.engine import LocalEngine

SAMPLED_SHARE = 0.01


@dataclass
class Turn:
    """A finished turn: the whole sequence, of which the last `num_output` tokens were generated."""

    tokens: list[int]
    num_output: int


@dataclass
class Load:
    """`clients` clients with `sessions_each` sessions of up to `max_len` tokens; a turn is `num_new` tokens in and
    `num_output` out. Sessions start at all lengths, like those of a server that has run for a while. A session at its
    greatest length starts anew with an empty history, so that the total that all of them hold stays about the same."""

    clients: int
    sessions_each: int
    max_len: int
    num_new: int
    num_output: int
    vocab_size: int
    seed: int = 0


@dataclass
class Talk:
    session_id: str
    history: list[int] = field(default_factory=list)


class Clients:
    """A DeltaSink that keeps every client busy until `stop`. `errors` has every turn that did not end normally."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.rng = random.Random(load.seed)
        self.talks = [
            [Talk(f"c{client}-{number}") for number in range(load.sessions_each)]
            for client in range(load.clients)
        ]
        self.engine: LocalEngine | None = None
        self.turns_begun = 0
        self.turns = 0
        self.tokens = 0
        self.turn_s: list[float] = []
        self.sample: list[Turn] = []
        self.errors: list[str] = []
        self.stopping = False
        self.idle = threading.Event()
        self.filled = threading.Event()  # every session has had its first turn
        self._unvisited = [list(talks) for talks in self.talks]
        self._flights: dict[str, tuple[Talk, GenerateRequest, list[int], float]] = {}

    def start(self, engine: LocalEngine) -> None:
        self.engine = engine
        for client in range(self.load.clients):
            self._begin(client)

    def stop(self, timeout_s: float) -> bool:
        """Starts no more turns; returns True once all running turns have ended."""
        self.stopping = True
        return self.idle.wait(timeout_s)

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            talk, spec, output, begun_s = self._flights[delta.request_id]
            output += delta.token_ids
            self.tokens += len(delta.token_ids)
            if delta.finish is None:
                continue
            del self._flights[delta.request_id]
            self.turn_s.append(time.perf_counter() - begun_s)
            if delta.finish.reason is FinishReason.LENGTH:
                self.turns += 1
                talk.history = [*spec.history[: spec.history_len], *spec.new_tokens, *output]
                if self.rng.random() < SAMPLED_SHARE:
                    self.sample.append(Turn(talk.history, len(output)))
            else:
                self.errors.append(f"{delta.request_id}: {delta.finish}")
            if not self.stopping:
                self._begin(int(delta.request_id.split("/")[0]))
        if self.stopping and not self._flights:
            self.idle.set()

    def _begin(self, client: int) -> None:
        load = self.load
        count, unvisited = load.num_new, self._unvisited[client]
        if unvisited:
            talk = unvisited.pop()
            count = self.rng.randrange(load.num_new, load.max_len - load.num_output)
        else:
            talk = self.rng.choice(self.talks[client])
            if not any(self._unvisited):
                self.filled.set()
        if len(talk.history) + count + load.num_output > load.max_len:
            talk.history = []
        self.turns_begun += 1
        spec = GenerateRequest(
            f"{client}/{self.turns_begun}",
            [self.rng.randrange(3, load.vocab_size) for _ in range(count)],
            SamplingParams(load.num_output, temperature=0.0, ignore_eos=True),
            history=talk.history,
            history_len=len(talk.history),
            session_id=talk.session_id,
        )
        self._flights[spec.request_id] = (talk, spec, [], time.perf_counter())
        assert self.engine is not None
        self.engine.submit(spec)
