"""Takes a replica out of use when its engine has ended or hangs, before Serve's health check acts."""

from __future__ import annotations

import logging

from engine.api import Engine
from serving.replica.heartbeats import Heartbeats

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5


class EngineWatch:
    """Watches the engine. Call `look` every WATCH_INTERVAL_S. A step hangs if it takes longer than `step_timeout_s`.

    Serve stops an unhealthy replica like any other: it waits for its turns. So the watch ends these turns with an
    error after which they continue on another replica. It also tells the controller that this replica serves nothing
    any more, so that its sessions move when they are next used.
    """

    def __init__(self, engine: Engine, heartbeats: Heartbeats, *, step_timeout_s: float) -> None:
        self._engine = engine
        self._heartbeats = heartbeats
        self._step_timeout_s = step_timeout_s
        self._fault: str | None = None

    @property
    def fault(self) -> str | None:
        """Why the replica must be replaced (None: it need not). A slow step is no reason; a step that hangs is."""
        if self._fault is not None:
            return self._fault
        if not self._engine.alive:
            return "the engine's thread has ended"
        age_s = self._engine.step_age_s
        return (
            f"the engine's step hangs: it began {age_s:.0f} s ago" if age_s > self._step_timeout_s else None
        )

    async def look(self) -> None:
        if self._fault is not None or (fault := self.fault) is None:
            return
        self._fault = fault
        logger.error("%s; this replica serves nothing any more", fault)
        self._engine.abandon()
        await self._heartbeats.farewell(fault)
