"""Heartbeats: what the controller is told of this replica: that it is there, its load, its sessions, and its end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from controllers.errors import ControllerError
from controllers.records import ReplicaAddress, ReplicaStatus
from controllers.session import SessionController
from engine.api import Engine
from serving.replica.drain import ReplicaDrain
from serving.replica.reported_sessions import ReportedSessions
from serving.replica.session_host import SessionHost
from serving.replica.session_offers import SessionOffers
from serving.wire.controller_calls import ControllerCalls
from serving.wire.shard_calls import ShardCalls

logger = logging.getLogger(__name__)


class Heartbeats:
    """Tells the controller of this replica, and passes on what it answers. `settings_hash` tells old and new replicas
    of a rolling update apart. Used on the replica's event loop only."""

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        sessions: SessionController,
        controller: ControllerCalls,
        host: SessionHost,
        offers: SessionOffers,
        drain: ReplicaDrain,
        *,
        settings_hash: str,
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._controller = controller
        self._host = host
        self._offers = offers
        self._drain = drain
        self._settings_hash = settings_hash
        self._reported = ReportedSessions(engine, sessions, len(controller.shards), controller.shard_of)
        self._left = False
        self.address: ReplicaAddress | None = None
        """Where front ends reach this replica. Set once it listens."""

    def status(self) -> ReplicaStatus:
        """This replica's load. Cached pages count as free, since they can be evicted."""
        stats = self._engine.stats()
        return ReplicaStatus(
            replica_id=self._replica_id,
            free_tokens=(stats.pages.free + stats.pages.cached) * stats.page_size,
            total_tokens=stats.pages.total * stats.page_size,
            sessions=stats.sessions,
            running=stats.running,
            waiting=stats.waiting,
            draining=self._drain.draining,
            step_age_s=self._engine.step_age_s,
            settings_hash=self._settings_hash,
            address=self.address,
        )

    async def beat(self, shard: int = 0) -> None:
        """Reports the load and what is new of the shard's sessions. Drops sessions that are closed or owned elsewhere.

        It does not wait for the engine's step: a slow replica is not a dead one. After `farewell` it does nothing.
        """
        if self._left:
            return
        await self._reported.look()
        await self._report(shard)
        while self._reported.has_more(shard) and not self._left:
            await self._report(shard)

    async def farewell(self, fault: str = "") -> None:
        """Tells the controller that this replica answers nothing any more, and its `fault`, if that is the reason. A
        ControllerError is only logged: without the farewell, the controller notices the silence."""
        self._left = True
        await asyncio.gather(*(self._leave(shard, fault) for shard in self._controller.shards))

    async def _leave(self, shard: ShardCalls, fault: str) -> None:
        try:
            if fault:
                await shard.register_replica(replace(self.status(), fault=fault))
            await shard.deregister_replica(self._replica_id)
        except ControllerError as error:
            logger.warning("the controller was not told of the end: %s", error)

    async def _report(self, shard: int) -> None:
        report, held = self._reported.next(shard)
        load = replace(self.status(), held=held)
        controller = self._controller.shards[shard]
        reply = await controller.heartbeat(load, report)
        self._reported.answered(shard, report, reply)
        self._offers.crowded(shard, reply.crowded)
        if reply.draining:  # the controller's answer to an order may have been lost
            self._drain.begin()
        if not reply.known and not self._left:
            await controller.register_replica(load)
        for session_id, epoch in zip(reply.stale_sessions, reply.stale_epochs, strict=True):
            self._host.drop_stale(session_id, epoch)
