"""A close that waits for a turn whose client has left, while its replica cannot be reached and the log is away."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.mutations import mutated
from tests.simulation.schedule import Close, Fault, Schedule, Turn
from tests.simulation.simulation import run, undisturbed

SETTINGS = (
    ("replicas", 2),
    ("ingresses", 1),
    ("num_pages", 96),
    ("host_pages", 20),
    ("disk_pages", 100),
    ("prefix_cache", True),
    ("slowness", 30),
    ("ngram", False),
    ("rebalancing", False),
    ("strict", False),
    ("log", "sqlite"),
)
CLIENTS = (
    (Turn(0.1547, 2, 3), Turn(0.1228, 2, 2, leave_s=0.0023), Close(0.0256)),
    (Turn(0.0067, 2, 2, leave_s=0.0049),),
)
FAULTS = (
    Fault(0.557, "cut ingress from replica", 3, 4.46, 0, 0.0),
    Fault(4.104, "log away", 0, 4.18, 0, 0.0),
)
LUCKS = range(370, 376)


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    with undisturbed():
        yield


def violations(seed: int) -> tuple[str, ...]:
    return run(Schedule(seed, SETTINGS, CLIENTS, FAULTS)).violations


def test_a_close_that_waits_for_a_turn_is_carried_out_though_its_replica_is_lost() -> None:
    """Earlier the close was forgotten. If the log does not record it, the same schedule finds the fault again."""
    assert [violations(seed) for seed in LUCKS] == [()] * len(LUCKS)
    with mutated("a close that waits is not in the log"):
        found = (what for seed in LUCKS for what in violations(seed))
        assert any("told as closed" in what for what in found)
