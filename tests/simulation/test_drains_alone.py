"""Operators' drains, and nothing else: clients notice nothing, and no turn goes on elsewhere in mid-stream."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.simulation.schedule import UNDISTURBED, Fault, Schedule, Turn
from tests.simulation.simulation import run, undisturbed


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


def schedule_of(seed: int) -> Schedule:
    """Four clients without sessions, while a replica is drained, and for long after."""
    random = Random(f"drains {seed}")
    clients = tuple(
        tuple(Turn(random.expovariate(10.0), random.randint(1, 6), 8, stateless=True) for _ in range(10))
        for _ in range(4)
    )
    drain = Fault(random.uniform(0.0, 1.0), "drain replica", random.randrange(6), 0.0, 0, 0.0)
    return Schedule(seed, UNDISTURBED, clients, (drain,))


@pytest.mark.parametrize("seed", range(6))
def test_a_drained_replica_takes_no_turn_that_it_could_not_end(seed: int) -> None:
    """Serve goes on listing it until its health checks have failed. Turns without a session were begun there, and
    ingresses, which leave a replica that has said farewell, began them again."""
    outcome = run(schedule_of(seed))
    assert outcome.violations == ()
    assert outcome.turns == 4 * 10
