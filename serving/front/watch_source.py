"""A look at the whole cluster for watchers: replicas' figures, the controller's view, where sessions' KV is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from cache.slots import KVPlace
from controllers.errors import ControllerError
from controllers.records import ClusterView, LedgerEntry
from serving.front.replica_calls import ReplicaCalls
from serving.front.replica_gone import ReplicaGone
from serving.watch.cluster_state import Json, Look
from serving.wire.calls import Audit, Describe, SessionPlaces
from serving.wire.controller_calls import ControllerCalls
from serving.wire.turns import ServiceError

PATIENCE_S = 2.0
"""Timeout for each part that is asked. A watcher wants to see that a part does not answer, not wait for it."""


class ClusterSource:
    """Implements LookSource (cluster_watch.py). `told` gives a session as the API lists it."""

    def __init__(
        self,
        replicas: ReplicaCalls,
        controller: ControllerCalls,
        told: Callable[[LedgerEntry, float], Json],
    ) -> None:
        self._replicas = replicas
        self._controller = controller
        self._told = told
        self._last = ClusterView(0)

    async def look(self, cursor: str | None, limit: int) -> Look:
        figures, (view, trouble) = await asyncio.gather(
            self._replicas.broadcast(Describe(), PATIENCE_S), self._view(cursor, limit)
        )
        places = await self._places(view, {each["replica_id"] for each in figures})
        now_s = time.time()
        rows = [self._told(entry, now_s) for entry in view.recent]
        return Look(now_s, view, figures, rows, places, trouble)

    async def audit_of(self, replica_id: str) -> Mapping[str, Any] | None:
        try:
            answer: dict[str, Any] = await self._replicas.call(replica_id, Audit())
        except (ReplicaGone, ServiceError):
            return None
        return answer

    async def _view(self, cursor: str | None, limit: int) -> tuple[ClusterView, str | None]:
        """The controller's view, and what is missing in it. While it does not answer: its last view, without events."""
        try:
            told = await self._controller.look(cursor, limit, PATIENCE_S)
        except ControllerError:
            last = self._last
            return ClusterView(last.sessions, last.recent, last.states), "the controller does not answer"
        self._last = told.joined
        names = ", ".join(map(str, told.missing))
        trouble = (
            f"without the sessions of controller shard {names}, which does not answer" if names else None
        )
        return told.joined, trouble

    async def _places(self, view: ClusterView, answering: set[str]) -> dict[str, Mapping[str, KVPlace]]:
        """Where sessions' KV is, by replica. Leaves out replicas that do not answer, or do not know the call yet."""
        held: dict[str, list[str]] = {}
        for entry in view.recent:
            if entry.replica_id in answering:
                held.setdefault(entry.replica_id, []).append(entry.session_id)
        calls = [
            self._replicas.call(replica_id, SessionPlaces(tuple(names)), PATIENCE_S)
            for replica_id, names in held.items()
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            replica_id: answer
            for replica_id, answer in zip(held, answers, strict=True)
            if not isinstance(answer, BaseException)
        }
