"""A cell of the matrix whose requests have every kind of sampling, constraints, watchers and faults at once. Sessions
are forked, and some requests go on where others were."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, replace

from engine.api import (
    ConstraintFailed,
    FinishReason,
    GenerateRequest,
    LogprobParams,
    SamplingParams,
    StepFailed,
    TokenDelta,
)
from engine.batch import ScheduledBatch
from engine.models.loader import LoadedModel
from engine.runner.protocol import Launch
from tests.parity.matrix_cell import CONTEXT, Cell, CellRun, Flight

EOS = frozenset({2, 9})
TURNS = 14
FAULTS = 0.02
"""The share of steps that fail at their launch, and of those that fail later."""


class Words:
    """A TextWatcher that ends a request where one token follows another."""

    def __init__(self, first: int, second: int) -> None:
        self._words = first, second
        self._last = -1

    def accept(self, token_id: int) -> str | None:
        pair, self._last = (self._last, token_id), token_id
        return str(pair) if pair == self._words else None


@dataclass
class Islands:
    """A TokenConstraint. It holds `length` tokens after each `opener`, or all of them. What it allows follows from the
    token before and from how many there were. With `endable` the output may end at every second token."""

    opener: int
    length: int
    everywhere: bool
    most: int | None
    endable: bool
    vocab_size: int
    left: int = 0
    count: int = 0
    last: int = 0

    @property
    def holds(self) -> bool:
        return self.everywhere or self.left > 0

    @property
    def may_end(self) -> bool:
        return self.endable and self.count % 2 == 0

    @property
    def complete(self) -> bool:
        return self.most is not None and self.count >= self.most

    def choices(self) -> set[int]:
        return {token for token in range(self.vocab_size) if (token + self.last + self.count) % 3 == 0}

    def allowed(self) -> bytes:
        bits = sum(1 << token for token in self.choices())
        return bits.to_bytes(-(-self.vocab_size // 8), "little")

    def accept(self, token_id: int) -> None:
        assert not self.holds or token_id in self.choices()
        self.count, self.last = self.count + 1, token_id
        if self.left:
            self.left -= 1
        elif token_id == self.opener:
            self.left = self.length


@dataclass
class Ended:
    """A request that came to its end by itself. `words` and `islands` are as they were at its begin."""

    flight: Flight
    last: TokenDelta
    words: tuple[int, int] | None
    islands: Islands | None

    @property
    def prompt(self) -> list[int]:
        spec = self.flight.spec
        return [*spec.history[: spec.history_len], *spec.new_tokens]


class MixedRun(CellRun):
    """`ended` is what must agree with tests/parity/expected_picks.py."""

    def __init__(self, cell: Cell, target: LoadedModel, draft: LoadedModel | None) -> None:
        super().__init__(cell, target, draft, EOS)
        self.turns_left = dict.fromkeys(self.histories, TURNS)
        self.ended: list[Ended] = []
        self.forks: list[Future[int]] = []
        self._watched: dict[str, tuple[tuple[int, int] | None, Islands | None]] = {}
        self._launch = self.runner.launch
        self.runner.launch = self._launch_or_fail

    def _act(self) -> None:
        super()._act()
        draw = self.rng.random()
        if draw < 0.06:
            self._fork()
        elif draw < 0.15 and self.ended and any(self.turns_left.values()):
            self._resume(self.rng.choice(self.ended[-10:]))

    def _fork(self) -> None:
        busy = {flight.spec.session_id for flight in self.in_flight.values()}
        idle = [session_id for session_id in self.histories if session_id not in busy]
        parents = [session_id for session_id in idle if self.histories[session_id]]
        if parents and len(idle) > 1:
            parent = self.rng.choice(parents)
            child = self.rng.choice([session_id for session_id in idle if session_id != parent])
            history = self.histories[parent]
            length = self.rng.randrange(1, len(history) + 1)
            chain = self.engine.empty_chain("")
            chain.extend(history)
            self.forks.append(self.engine.fork_session(parent, child, chain.tokens, length, chain))
            self.histories[child] = history[:length]

    def _resume(self, ended: Ended) -> None:
        """Another request goes on from a part of an output, with its own watcher and constraint."""
        spec, output = ended.flight.spec, ended.flight.output
        if spec.resumed_tokens or not output:
            return
        self._names += 1
        again = replace(
            spec,
            request_id=f"again/{self._names}",
            session_id=None,
            resumed_tokens=output[: self.rng.randrange(1, len(output) + 1)],
        )
        again = self._with_watchers(again, ended.words, ended.islands)
        self.events["resumed"] += 1
        self.in_flight[again.request_id] = Flight(again, None)
        self.engine.submit(again)

    def _spec(
        self,
        new_tokens: list[int],
        session_id: str | None,
        history: list[int],
        max_new_tokens: int,
        logprobs: LogprobParams | None,
    ) -> GenerateRequest:
        spec = super()._spec(new_tokens, session_id, history, max_new_tokens, logprobs)
        spec = replace(spec, sampling=random_params(self.rng, self.vocab_size, spec.sampling))
        words, islands, token = None, None, lambda: self.rng.randrange(self.vocab_size)
        if self.rng.random() < 0.2:
            words = token(), token()
        if self.rng.random() < 0.25:
            always, most, endable = (
                self.rng.random() < 0.3,
                self.rng.choice([None, 7]),
                self.rng.random() < 0.5,
            )
            islands = Islands(token(), self.rng.randrange(1, 5), always, most, endable, self.vocab_size)
        return self._with_watchers(spec, words, islands)

    def _with_watchers(
        self, spec: GenerateRequest, words: tuple[int, int] | None, islands: Islands | None
    ) -> GenerateRequest:
        self._watched[spec.request_id] = words, islands
        return replace(
            spec,
            watcher=None if words is None else Words(*words),
            constraint=None if islands is None else replace(islands),
        )

    def _end(self, flight: Flight, delta: TokenDelta) -> None:
        assert delta.finish is not None
        if delta.finish.reason is FinishReason.ERROR:
            error = delta.finish.error
            self.events[type(error).__name__] += 1
            if isinstance(error, StepFailed):
                assert "planted" in error.message, error
                return
            assert isinstance(error, ConstraintFailed)
        else:
            super()._end(flight, delta)
        if delta.finish.reason is not FinishReason.ABORT:
            self.ended.append(Ended(flight, delta, *self._watched.pop(flight.spec.request_id)))

    def _launch_or_fail(self, batch: ScheduledBatch) -> Launch:
        draw = self.rng.random()
        if draw < FAULTS:
            raise RuntimeError("planted")
        launch = self._launch(batch)
        return Failing(launch) if draw < 2 * FAULTS else launch


@dataclass
class Failing:
    """A step that fails once it has run."""

    launch: Launch

    def result(self) -> None:
        self.launch.result()
        raise RuntimeError("planted")


def random_params(rng: random.Random, vocab_size: int, params: SamplingParams) -> SamplingParams:
    def maybe(share: float, choices: list[float], off: float) -> float:
        return rng.choice(choices) if rng.random() < share else off

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    return replace(
        params,
        max_new_tokens=0 if rng.random() < 0.05 else min(params.max_new_tokens, CONTEXT),
        temperature=maybe(0.5, [0.3, 1.0, 2.5], 0.0),
        top_p=maybe(0.3, [0.3, 0.7, 0.95], 1.0),
        top_k=int(maybe(0.3, [1, 3, 10, 100], 0)),
        min_p=maybe(0.2, [0.02, 0.3], 0.0),
        frequency_penalty=maybe(0.2, [-0.5, 0.7, 2.0], 0.0),
        presence_penalty=maybe(0.2, [-0.5, 0.7, 2.0], 0.0),
        repetition_penalty=maybe(0.2, [0.8, 1.3], 1.0),
        logit_bias={token: rng.choice([-100.0, 3.0]) for token in tokens(3 * (rng.random() < 0.2))},
        seed=rng.choice([0, -1, 2**63, rng.randrange(10**9)]),
        ignore_eos=rng.random() < 0.5,
        min_new_tokens=int(maybe(0.3, [1, 3, 10, 200], 0)),
        allowed_token_ids=tokens(rng.choice([1, 2, 6])) if rng.random() < 0.1 else None,
        bad_words=tuple(tokens(rng.choice([1, 2, 3])) for _ in range(4 * (rng.random() < 0.15))),
    )
