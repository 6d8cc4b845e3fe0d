"""A load of sessions with turns, the same for every side, and its timings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class Plan:
    """Every session starts with the same `shared` tokens; each turn sends `new` tokens and is answered by `out`. A
    session's next turn starts when its previous one has ended. Token ids depend only on the seed."""

    sessions: int = 64
    turns: int = 20
    shared: int = 8192
    new: int = 64
    out: int = 64
    vocab_size: int = 128_256
    seed: int = 7

    @property
    def longest(self) -> int:
        return self.shared + self.turns * (self.new + self.out)

    def shared_tokens(self) -> list[int]:
        return self._tokens(self.shared, 0, 0)

    def new_tokens(self, session: int, turn: int) -> list[int]:
        """`session` and `turn` count from 1."""
        return self._tokens(self.new, session, turn)

    def _tokens(self, count: int, session: int, turn: int) -> list[int]:
        random = np.random.default_rng([self.seed, session, turn])
        return random.integers(3, self.vocab_size, count).tolist()  # type: ignore[no-any-return]


class Event(NamedTuple):
    """Tokens that came; `time_s` on time.perf_counter's clock."""

    name: str
    time_s: float
    token_ids: tuple[int, ...]
    finished: bool


class Side(Protocol):
    """The server or engine that the load runs on."""

    @property
    def name(self) -> str: ...

    def submit(self, name: str, history: Sequence[int], new: Sequence[int], count: int) -> None:
        """`name` is seed-session/turn. `history` is the session's tokens so far and is not changed later; `count`
        tokens are asked for."""

    def events(self, limit_s: float) -> list[Event]: ...


@dataclass(slots=True)
class Turn:
    session: int
    number: int
    submit_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    output: list[int] = field(default_factory=list)


class OutOfTime(RuntimeError):
    """The shared history was not computed in time."""


def run_load(side: Side, plan: Plan, seconds: float) -> list[Turn]:
    """All turns that ended within `seconds`. The shared history is computed once before them; its time counts only
    toward the limit. Requests are called seed-session/turn, where session 0 is the shared history by itself. So two
    plans with the same seed must not follow each other on one side. Raises OutOfTime, and whatever the side raises."""
    deadline_s = time.perf_counter() + seconds
    shared = plan.shared_tokens()
    name_of_shared = f"{plan.seed}-0/1"
    side.submit(name_of_shared, [], shared, 1)
    while not any(event.finished and event.name == name_of_shared for event in side.events(1.0)):
        if time.perf_counter() > deadline_s:
            raise OutOfTime(f"{side.name}: {len(shared)} tokens took more than {seconds:.0f} s")
    histories = {session: list(shared) for session in range(1, plan.sessions + 1)}
    running: dict[str, Turn] = {}
    done: list[Turn] = []

    def begin(session: int, number: int) -> None:
        new = plan.new_tokens(session, number)
        name = f"{plan.seed}-{session}/{number}"
        running[name] = Turn(session, number, time.perf_counter())
        side.submit(name, histories[session], new, plan.out)
        histories[session] = [*histories[session], *new]

    for session in histories:
        begin(session, 1)
    while running and (left_s := deadline_s - time.perf_counter()) > 0:
        for event in side.events(left_s):
            turn = running.get(event.name)
            if turn is None:  # from an earlier load that was cut off
                continue
            if event.token_ids and not turn.output:
                turn.first_s = event.time_s
            turn.output += event.token_ids
            if event.finished:
                turn.end_s = event.time_s
                done.append(running.pop(event.name))
                histories[turn.session] += turn.output
                if turn.number < plan.turns:
                    begin(turn.session, turn.number + 1)
    return done


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of turns 2 to `last`, which every session ended. Tokens are output tokens, over the time from the first
    beginning of those turns to the last end. TTFT is in seconds."""

    last: int
    turns: int
    tokens_per_s: float
    ttft_median_s: float
    ttft_p95_s: float
    turn_median_s: float


def last_whole_turn(done: Sequence[Turn], plan: Plan) -> int:
    counts = np.zeros(plan.turns + 2, dtype=int)
    for turn in done:
        counts[turn.number] += 1
    whole = 0
    while counts[whole + 1] == plan.sessions:
        whole += 1
    return whole


def figures(done: Sequence[Turn], last: int) -> Figures:
    """Raises ValueError if no session ended a second turn."""
    chosen = [turn for turn in done if 2 <= turn.number <= last]
    if not chosen:
        raise ValueError("no session ended its second turn")
    seconds = max(turn.end_s for turn in chosen) - min(turn.submit_s for turn in chosen)
    ttft_s = np.array([turn.first_s - turn.submit_s for turn in chosen])
    return Figures(
        last,
        len(chosen),
        sum(len(turn.output) for turn in chosen) / seconds,
        float(np.median(ttft_s)),
        float(np.quantile(ttft_s, 0.95)),
        float(np.median([turn.end_s - turn.submit_s for turn in chosen])),
    )
