"""Outages of the log, and processes that start during one."""

from __future__ import annotations

import pytest

from tests.simulation.schedule import UNDISTURBED, Fault, Schedule
from tests.simulation.simulation import run, undisturbed


@pytest.mark.parametrize("seed", range(3))
def test_a_replica_that_starts_in_an_outage_waits_for_its_end(seed: int) -> None:
    """Earlier its start failed after 15 s without an answer of the controller, which had no log (seed 801000196)."""
    faults = (
        Fault(0.5, "log away", 0, 40.0, 0, 0.0),
        Fault(1.0, "kill controller", 0, 0.0, 0, 0.0),
        Fault(2.0, "kill replica", 0, 0.0, 0, 0.0),
    )
    with undisturbed():
        outcome = run(Schedule(seed, UNDISTURBED, (), faults))
    assert outcome.violations == ()
