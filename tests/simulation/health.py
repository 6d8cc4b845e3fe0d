"""Serve's health checks. A replica that fails them is ended and replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.simulation.loop import World
from tests.simulation.network import Party

PERIOD_S = 1.0
MOST_FAILURES = 3


class HealthChecks:
    """Asks each replica once per PERIOD_S. When a replica has reported MOST_FAILURES times in a row that it is not
    well, `failed` gets the replica and its reason. A replica that does not answer is asked no more."""

    def __init__(self, world: World, failed: Callable[[Party, str], None]) -> None:
        self._world = world
        self._failed = failed

    def watch(self, replica: Party, failures: int = 0) -> None:
        async def ask() -> None:
            try:
                await replica.actor.check_health()
            except RuntimeError as error:
                if failures + 1 == MOST_FAILURES:
                    self._world.after(0.0, partial(self._failed, replica, str(error)))
                else:
                    self.watch(replica, failures + 1)
            else:
                self.watch(replica)

        def begin() -> None:
            if not replica.dead:
                replica.loop.create_task(ask())

        self._world.after(PERIOD_S, begin)
