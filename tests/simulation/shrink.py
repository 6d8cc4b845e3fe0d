"""Shrinks a failing schedule: leaves out operations and faults as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.simulation.schedule import Fork, Op, Schedule
from tests.simulation.simulation import Outcome, run

T = TypeVar("T")
LUCKS = 3
"""A shorter schedule has other random choices. This many seeds are tried before it counts as one that does not fail."""


def shrink(schedule: Schedule, play: Callable[[Schedule], Outcome] = run, most_runs: int = 400) -> Schedule:
    """The shortest schedule found within `most_runs` runs. It fails if `schedule` does."""
    runs = 0
    progress = True
    while progress and runs < most_runs:
        progress = False
        for shorter in _shorter(schedule):
            for luck in range(LUCKS):
                runs += 1
                tried = replace(shorter, seed=schedule.seed + luck)
                if play(tried).violations:
                    schedule, progress = tried, True
                    break
            if progress or runs >= most_runs:
                break
    return schedule


def _shorter(schedule: Schedule) -> Iterator[Schedule]:
    """Shorter schedules, larger cuts first."""
    for clients in _cuts(schedule.clients):
        yield replace(schedule, clients=clients)
    for faults in _cuts(schedule.faults):
        yield replace(schedule, faults=faults)
    for number, ops in enumerate(schedule.clients):
        for fewer in _cuts(ops):
            yield replace(schedule, clients=_with(schedule.clients, number, fewer))
        for place, op in enumerate(ops):
            if isinstance(op, Fork):
                for fewer in _cuts(op.ops):
                    other = _with(ops, place, replace(op, ops=fewer))
                    yield replace(schedule, clients=_with(schedule.clients, number, other))


def _cuts(items: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    """The items without a half of them, without a quarter, ... without a single one."""
    size = (len(items) + 1) // 2
    while size:
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        size //= 2


def _with(items: tuple, place: int, item: tuple[Op, ...] | Op) -> tuple:  # type: ignore[type-arg]
    return (*items[:place], item, *items[place + 1 :])
