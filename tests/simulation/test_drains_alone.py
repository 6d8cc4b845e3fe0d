"""Operators' drains as the only change: clients notice nothing, and no turn goes on elsewhere in mid-stream."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.simulation.schedule import UNDISTURBED, Fault, Schedule, Turn, make_schedule
from tests.simulation.simulation import Simulation, run, undisturbed


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


def schedule_of(seed: int, *, clients: int = 4, turns: int = 10, think_s: float = 0.1) -> Schedule:
    """Clients without sessions, during a drain of a replica and long after it."""
    random = Random(f"drains {seed}")
    ops = tuple(
        tuple(
            Turn(random.expovariate(1 / think_s), random.randint(1, 6), 8, stateless=True)
            for _ in range(turns)
        )
        for _ in range(clients)
    )
    drain = Fault(random.uniform(0.0, 1.0), "drain replica", random.randrange(6), 0.0, 0, 0.0)
    return Schedule(seed, UNDISTURBED, ops, (drain,))


@pytest.mark.parametrize("seed", range(6))
def test_a_drained_replica_takes_no_turn_that_it_could_not_end(seed: int) -> None:
    """Serve lists a drained replica until its health checks have failed. Earlier, turns without a session were begun
    there. Ingresses leave a replica that has said farewell, so they began these turns again elsewhere."""
    outcome = run(schedule_of(seed))
    assert outcome.violations == ()
    assert outcome.turns == 4 * 10


@pytest.mark.parametrize("seed", [13442, 312477])
def test_the_last_answer_of_a_drained_replica_is_heard(seed: int) -> None:
    """Earlier, word that the replica had gone overtook its last answer, and the turn went on elsewhere. Or the turn was
    so short that it began and ended between two checks for turns in progress."""
    assert run(make_schedule(seed, 10)).violations == ()


@pytest.mark.parametrize("seed", [320112])
def test_turns_that_are_refused_keep_no_drained_replica(seed: int) -> None:
    """Earlier, refused turns counted as answers for whose arrival the replica waited."""
    assert run(make_schedule(seed, 10)).violations == ()


@pytest.mark.parametrize("seed", [2])
def test_a_drain_ends_though_turns_come_on_and_on(seed: int) -> None:
    """Earlier, the replica waited for a moment without a turn, and took the next turn each time."""
    simulation = Simulation(schedule_of(seed, clients=12, turns=50, think_s=0.001))
    replaced_s: list[float] = []

    def look() -> None:
        if simulation.clients.busy:
            if any(party.dead for party in simulation.operator.drained):
                replaced_s.append(simulation.world.now_s)
            simulation.world.after(0.1, look)

    simulation.world.after(1.0, look)
    outcome = simulation.play()
    simulation.end()
    assert outcome.violations == ()
    assert outcome.turns == 12 * 50
    assert replaced_s, "the clients were done before it was empty"
