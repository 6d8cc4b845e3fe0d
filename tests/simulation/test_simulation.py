"""The whole cluster under faults, in virtual time: fixed seeds, and fresh seeds, which are printed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.simulation.mutations import mutated
from tests.simulation.schedule import Fault, Turn, make_schedule
from tests.simulation.shrink import shrink
from tests.simulation.simulation import run, undisturbed

FIXED = range(60)
FRESH = 20
AT_ONCE = 20
SOON_FOUND = ("a commit without an answer counts as made", "keys are not looked up")


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


def play(seeds: list[int]) -> None:
    """Plays the seeds. Fails with a shortest schedule of the first seed that fails."""
    for seed in seeds:
        schedule = make_schedule(seed)
        if run(schedule).violations:
            shortest = shrink(schedule)
            pytest.fail("\n".join([f"seed {seed}", *shortest.lines(), *run(shortest).violations]))


@pytest.mark.parametrize("first", FIXED[::AT_ONCE])
def test_fixed_seeds(first: int) -> None:
    play(list(range(first, first + AT_ONCE)))


def test_fresh_seeds() -> None:
    """Other seeds in every run. To repeat a failure: `python -m tests.simulation.run --seeds N..N+1`."""
    seeds = [random.SystemRandom().randrange(10**9) for _ in range(FRESH)]
    print(f"seeds {seeds}")  # noqa: T201
    play(seeds)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, second = run(make_schedule(seed)), run(make_schedule(seed))
    assert first == second
    assert first.steps > 100


def test_turns_are_done_in_most_runs() -> None:
    """Otherwise the checks would see nothing."""
    schedules = [make_schedule(seed) for seed in range(20)]
    asked = sum(isinstance(op, Turn) for schedule in schedules for ops in schedule.clients for op in ops)
    assert sum(run(schedule).turns for schedule in schedules) > asked * 0.7


def test_every_kind_of_fault_is_drawn() -> None:
    kinds = {fault.kind for seed in range(200) for fault in make_schedule(seed).faults}
    assert len(kinds) >= 10
    assert all(isinstance(fault, Fault) for fault in make_schedule(3).faults)


@pytest.mark.parametrize("name", SOON_FOUND)
def test_faults_that_are_put_back_are_found(name: str) -> None:
    """Two of the mutations. `python -m tests.simulation.find_mutations` tries all of them."""
    with mutated(name):
        assert any(run(make_schedule(seed)).violations for seed in range(40))
