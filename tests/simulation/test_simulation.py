"""The whole cluster under faults, in virtual time: fixed seeds, and fresh seeds, which are printed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from tests.simulation.mutations import mutated
from tests.simulation.schedule import Fault, Turn, make_schedule
from tests.simulation.shrink import shrink
from tests.simulation.simulation import Outcome, run, undisturbed

FIXED = range(60)
FRESH = 20
AT_ONCE = 20
SOON_FOUND = ("a commit without an answer counts as made", "keys are not looked up")


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


@cache
def play(seed: int) -> Outcome:
    """Plays the seed, once. If it fails, so does the test, with a shortest schedule."""
    schedule = make_schedule(seed)
    outcome = run(schedule)
    if outcome.violations:
        shortest = shrink(schedule)
        pytest.fail("\n".join([f"seed {seed}", *shortest.lines(), *run(shortest).violations]))
    return outcome


@pytest.mark.parametrize("first", FIXED[::AT_ONCE])
def test_fixed_seeds(first: int) -> None:
    """Most turns are done. Otherwise the checks would see nothing."""
    seeds = range(first, first + AT_ONCE)
    done = sum(play(seed).turns for seed in seeds)
    asked = sum(isinstance(op, Turn) for seed in seeds for ops in make_schedule(seed).clients for op in ops)
    assert done > asked * 0.7


def test_fresh_seeds() -> None:
    """Other seeds in every run. To repeat a failure: `python -m tests.simulation.run --seeds N..N+1`."""
    seeds = [random.SystemRandom().randrange(10**9) for _ in range(FRESH)]
    print(f"seeds {seeds}")  # noqa: T201
    for seed in seeds:
        play(seed)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    assert run(make_schedule(seed)) == play(seed)
    assert play(seed).steps > 100


def test_every_kind_of_fault_is_drawn() -> None:
    kinds = {fault.kind for seed in range(200) for fault in make_schedule(seed).faults}
    assert len(kinds) >= 10
    assert all(isinstance(fault, Fault) for fault in make_schedule(3).faults)


@pytest.mark.parametrize("name", SOON_FOUND)
def test_faults_that_are_put_back_are_found(name: str) -> None:
    """Two of the mutations. `python -m tests.simulation.find_mutations` tries all of them."""
    with mutated(name):
        assert any(run(make_schedule(seed)).violations for seed in range(40))
