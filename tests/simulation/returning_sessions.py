"""Schedules in which sessions leave a replica, are rewound and continued elsewhere, and come back."""

from __future__ import annotations

from random import Random

from tests.simulation.schedule import UNDISTURBED, Fault, Schedule, Turn

FROZEN_S = 11.0
"""Longer than a replica may be silent, shorter than Serve's health check waits."""


def schedule_of(seed: int) -> Schedule:
    """A schedule in which one replica is frozen, so that its sessions move. Once it is back, the other replica dies and
    the sessions return."""
    random = Random(f"return {seed}")
    ops = tuple(
        tuple(
            Turn(
                random.expovariate(2.0),
                random.randint(1, 6),
                random.randint(1, 8),
                rewind=random.random() if random.random() < 0.4 else None,
            )
            for _ in range(40)
        )
        for _ in range(4)
    )
    frozen, frozen_s = random.randrange(2), random.uniform(1.0, 3.0)
    killed_s = frozen_s + FROZEN_S + random.uniform(2.5, 4.0)
    faults = (
        Fault(frozen_s, "freeze replica", frozen, FROZEN_S, 0, 0.0),
        Fault(killed_s, "kill replica", 1 - frozen, 0.0, 0, 0.0),
    )
    return Schedule(seed, UNDISTURBED, ops, faults)
