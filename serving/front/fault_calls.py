"""Plants faults from a front end: in a replica, over its link, or in the cluster controller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from fastapi import APIRouter

from controllers.session_keys import session_key
from serving.debug.controller_faults import plant_in_controller
from serving.debug.kinds import IN_CONTROLLER
from serving.front.api.debug import FaultBody, routes
from serving.front.replica_calls import ANY_REPLICA, ReplicaCalls
from serving.front.replica_gone import ReplicaGone
from serving.wire.calls import PlantFault
from serving.wire.controller_calls import CONTROLLER_TIMEOUT_S, NAMESPACE
from serving.wire.errors import unavailable
from serving.wire.turns import ServiceError


def fault_routes(replicas: ReplicaCalls, controllers: Sequence[str]) -> APIRouter:
    """`controllers` are the names of the controller's actors."""
    calls = FaultCalls(replicas, controllers)
    return routes(calls.plant, calls.mend)


class FaultCalls:
    """Plants and mends faults. Exists only if `debug.faults` is set."""

    def __init__(self, replicas: ReplicaCalls, controllers: Sequence[str]) -> None:
        self._replicas = replicas
        self._controllers = controllers

    async def plant(self, body: FaultBody) -> dict[str, Any]:
        if body.kind in IN_CONTROLLER:
            await self._in_controller(body.kind.value, body.for_s, body.delay_s)
            return {"kind": body.kind.value, "for_s": body.for_s, "delay_s": body.delay_s}
        session_id = None if body.session_id is None else session_key(body.tenant, body.session_id)
        order = PlantFault(body.kind.value, body.for_s, session_id, body.delay_s)
        *others, last = (
            [body.replica_id] if body.replica_id else await self._replicas.present() or [ANY_REPLICA]
        )
        for replica_id in others:
            with suppress(ServiceError):  # this replica has nothing to damage; another may have
                return await self._in_replica(replica_id, order)
        return await self._in_replica(last, order)

    async def mend(self) -> dict[str, Any]:
        """Ends all faults, in the controller and in all replicas."""
        await self._in_controller(None, 0.0, 0.0)
        return {"replicas": await self._replicas.broadcast(PlantFault())}

    async def _in_replica(self, replica_id: str, order: PlantFault) -> dict[str, Any]:
        try:
            planted: dict[str, Any] = await self._replicas.call(replica_id, order)
        except ReplicaGone as error:
            raise ServiceError(unavailable(f"replica {replica_id!r} does not answer")) from error
        return {"replica_id": replica_id, **planted}

    async def _in_controller(self, kind: str | None, for_s: float, delay_s: float) -> None:
        async with asyncio.timeout(CONTROLLER_TIMEOUT_S):
            for name in self._controllers:
                actor = ray.get_actor(name, namespace=NAMESPACE)
                await actor.__ray_call__.remote(plant_in_controller, kind, for_s, delay_s)
