"""Broken connections as the only fault: no session moves, no turn is repeated, and nothing is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.simulation.mutations import mutated
from tests.simulation.schedule import UNDISTURBED, Fault, Schedule, Turn
from tests.simulation.simulation import Simulation, run, undisturbed

MOVED = ("kedge_failovers_total", "kedge_takeovers_total")


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


def schedule_of(seed: int) -> Schedule:
    """Four sessions with room for all of their KV. About every 0.1 s one of the connections between their ingresses and
    replicas breaks."""
    random = Random(f"broken connections {seed}")
    clients = tuple(
        tuple(Turn(random.expovariate(10.0), random.randint(1, 6), 8) for _ in range(8)) for _ in range(4)
    )
    faults = tuple(
        Fault(random.uniform(0.0, 3.0), "break connection", random.randrange(6), 0.0, 0, 0.0)
        for _ in range(30)
    )
    return Schedule(seed, UNDISTURBED, clients, tuple(sorted(faults, key=lambda fault: fault.at_s)))


def counted(simulation: Simulation, names: tuple[str, ...]) -> float:
    """Sum of the named counters over all ingresses."""
    pages = [party.actor._metrics.render() for party in simulation.cluster.ingresses]
    families = [family for page in pages for family in text_string_to_metric_families(page)]
    return sum(sample.value for family in families for sample in family.samples if sample.name in names)


@pytest.mark.parametrize("seed", range(12))
def test_no_session_moves_and_nothing_is_computed_again(seed: int) -> None:
    simulation = Simulation(schedule_of(seed))
    try:
        outcome = simulation.play()
        prefilled = sum(party.actor._engine.stats().prefill_tokens for party in simulation.cluster.replicas)
        broken, moved = counted(simulation, ("kedge_connection_breaks_total",)), counted(simulation, MOVED)
        turns = [turn for life in simulation.store.lives for turn in life.turns]
    finally:
        simulation.end()
    assert outcome.violations == ()
    assert outcome.turns == 4 * 8 + 4  # each session takes one more turn at the end
    assert broken >= 3
    assert moved == 0
    # A turn computes its own tokens, and the last token of its history, which has no KV yet.
    assert prefilled == sum(len(turn.input) + bool(turn.before) for turn in turns)


@pytest.mark.parametrize("name", ["a channel goes on anywhere", "a channel tells again"])
def test_messages_that_are_left_out_or_repeated_are_found(name: str) -> None:
    with mutated(name):
        assert any(run(schedule_of(seed)).violations for seed in range(4))
