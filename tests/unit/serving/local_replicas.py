"""The replicas of rigs in this process, as a front end calls them: without links and without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from random import Random
from typing import Any

from controllers.errors import ControllerError
from engine.api import EngineError
from serving.front.known_places import Affinity
from serving.front.replica_calls import ANY_REPLICA, ReplicaCalls
from serving.front.replica_gone import Loss, ReplicaGone, ReplicaLate
from serving.front.replica_link import LinkTimes
from serving.wire.calls import AnyCall
from serving.wire.errors import error_info
from serving.wire.turns import ServiceError, TurnCall, TurnEvent
from tests.unit.serving.replica_rig import Rig


class LocalReplicas(ReplicaCalls):
    """Calls go to `rigs` directly. Those in `dead` cannot be reached any more: their processes have ended."""

    def __init__(self, rigs: Sequence[Rig]) -> None:
        def refuse(*_: Any) -> Any:
            raise AssertionError("there are no links")

        controller: Any = rigs[0].controller
        tasks = rigs[0].tasks
        super().__init__(controller, refuse, refuse, tasks, Random(0), times=LinkTimes(), call_timeout_s=1.0)
        self.rigs = {rig.replica_id: rig for rig in rigs}
        self.dead: set[str] = set()

    def rig_at(self, replica_id: str) -> Rig:
        """Raises ReplicaGone."""
        if replica_id == ANY_REPLICA:
            replica_id = next(iter(self.living()), replica_id)
        if replica_id in self.dead:
            raise ReplicaGone(replica_id, Loss.DIED, had_call=False)
        if replica_id not in self.rigs:
            raise ReplicaGone(replica_id, Loss.UNKNOWN, had_call=False)
        return self.rigs[replica_id]

    @asynccontextmanager
    async def turn(
        self, replica_id: str, call: TurnCall, epoch: int | None
    ) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        async with aclosing(self.rig_at(replica_id).events(call, epoch)) as events:
            yield events

    async def call(self, replica_id: str, call: AnyCall, timeout_s: float | None = None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await self.rig_at(replica_id).calls.answer(call)
        except TimeoutError as error:
            raise ReplicaLate from error
        except (ControllerError, EngineError) as error:
            raise ServiceError(error_info(error)) from error

    async def present(self) -> tuple[str, ...]:
        return tuple(self.living())

    async def pick(self, _affinity: Affinity, refused_by: Collection[str]) -> str:
        living = self.living()
        return next((name for name in living if name not in refused_by), next(iter(living), ANY_REPLICA))

    def has_other(self, refused_by: Collection[str]) -> bool:
        return any(name not in refused_by for name in self.living())

    def preferred(self, affinity: Affinity) -> str | None:
        return affinity.holder

    def living(self) -> list[str]:
        return [name for name in self.rigs if name not in self.dead]
