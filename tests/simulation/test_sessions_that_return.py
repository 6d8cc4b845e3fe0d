"""A session comes back to a replica after it was rewound and continued elsewhere. The KV left there is of another
history."""

from __future__ import annotations

import pytest

from tests.simulation.mutations import TRUSTED_SLOTS, mutated
from tests.simulation.returning_sessions import schedule_of
from tests.simulation.simulation import run, undisturbed


@pytest.mark.parametrize("seed", range(8))
def test_no_kv_of_another_history_is_used(seed: int) -> None:
    with undisturbed():
        outcome = run(schedule_of(seed))
    assert outcome.violations == ()


def test_kv_that_is_trusted_is_found() -> None:
    """Point 1 of the list of faults: all of a slot's KV was used, whatever tokens it belonged to."""
    with undisturbed(), mutated(TRUSTED_SLOTS):
        found = (what for seed in range(3) for what in run(schedule_of(seed)).violations)
        assert any("does not follow from its history" in what for what in found)
