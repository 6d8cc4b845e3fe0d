"""What this ingress's router knows of the replicas is told to the controller, which alone decides what that means."""

from __future__ import annotations

import asyncio
import logging

from controllers.errors import ControllerError
from serving.background import BackgroundTasks
from serving.front.ownership_cache import OwnershipCache
from serving.front.replica_calls import ReplicaCalls
from serving.wire.controller_calls import ControllerCalls
from serving.wire.routing_errors import Members, ReplicaGone

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.1
"""How often the router, which is in this process, is asked."""
REPORT_INTERVAL_S = 0.5
"""How often the controller is told though nothing has changed: it may have restarted, and it answers who is gone."""


class Membership:
    """Used on the ingress's event loop only. `look` is to be called every WATCH_INTERVAL_S.

    Serve gives no notice of what it stops: a replica that its router drops while it still answers is about to go.
    """

    def __init__(
        self,
        ingress_id: str,
        replicas: ReplicaCalls,
        controller: ControllerCalls,
        owners: OwnershipCache,
        tasks: BackgroundTasks,
    ) -> None:
        self._ingress_id = ingress_id
        self._replicas = replicas
        self._controller = controller
        self._owners = owners
        self._tasks = tasks
        self._told = Members()
        self._due_s = 0.0

    async def look(self) -> None:
        """Tells the controller if the members have changed, or it is time."""
        now_s = asyncio.get_running_loop().time()
        members = await self._replicas.members()
        if members is None or (members == self._told and now_s < self._due_s):
            return
        try:
            gone = await self._controller.report_members(self._ingress_id, members.listed, members.unlisted)
        except ControllerError as error:
            logger.warning("the controller was not told of the replicas: %s", error)
            return
        leaving = set(members.unlisted) - set(self._told.unlisted)
        self._told, self._due_s = members, now_s + REPORT_INTERVAL_S
        for replica_id in gone:
            self._owners.forget_replica(replica_id)
            self._replicas.lose(replica_id)
        if leaving:
            logger.info("replicas %s are listed no more: they drain", ", ".join(sorted(leaving)))
        for replica_id in leaving:
            self._owners.forget_replica(replica_id)
            self._tasks.start(self._hasten(replica_id))

    async def _hasten(self, replica_id: str) -> None:
        """Has the replica ask the controller now how it stands, rather than with its next heartbeat. The next look does
        not wait for it: it may not answer."""
        try:
            await self._replicas.call(replica_id, "heartbeat", timeout_s=REPORT_INTERVAL_S)
        except ReplicaGone:
            logger.info("replica %s has stopped", replica_id)
