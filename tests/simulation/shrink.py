"""From a schedule that fails to a shortest one: operations and faults are left out while it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.simulation.schedule import Fork, Op, Schedule
from tests.simulation.simulation import Outcome, run

T = TypeVar("T")
LUCKS = 3
"""A shorter schedule has other luck: so many seeds of its own are tried before it counts as one that holds."""


def shrink(schedule: Schedule, play: Callable[[Schedule], Outcome] = run, most_runs: int = 400) -> Schedule:
    """The shortest found within `most_runs`; it fails, if `schedule` did."""
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
    """The larger cuts first."""
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
    """Without a half, a quarter ... a single one."""
    size = (len(items) + 1) // 2
    while size:
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        size //= 2


def _with(items: tuple, place: int, item: tuple[Op, ...] | Op) -> tuple:  # type: ignore[type-arg]
    return (*items[:place], item, *items[place + 1 :])
