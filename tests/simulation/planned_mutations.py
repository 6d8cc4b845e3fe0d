"""Faults put back that make planned changes cost something: how a replica's end is noticed, and what it hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from controllers.cluster import Cluster
from controllers.records import LedgerEntry, ReplicaStatus
from controllers.replicas import ReplicaDirectory
from serving.front.replica_calls import ReplicaCalls
from serving.front.replica_gone import ReplicaGone
from serving.replica.drain import ReplicaDrain
from serving.replica.ordered_moves import OrderedMoves
from serving.wire.calls import MoveSession
from serving.wire.turns import MovedSession

Patches = list[Any]


def _heartbeats_end_retirement() -> Patches:
    """A heartbeat makes a replica live again that is about to go."""
    real = ReplicaDirectory._note

    def note(self: ReplicaDirectory, status: ReplicaStatus) -> None:
        real(self, status)
        self._replicas[status.replica_id].drains = status.draining

    return [patch.object(ReplicaDirectory, "_note", note)]


def _retirement_is_not_noticed() -> Patches:
    """A replica that Serve takes away behaves as before until it says farewell."""

    async def retire(self: ReplicaDrain, _within_s: float) -> None:
        await asyncio.sleep(self._within_s)

    return [patch.object(ReplicaDrain, "retire", retire)]


def _retiring_replicas_are_lost() -> Patches:
    """A replica that Serve takes away is reported as dead."""
    real = ReplicaDrain.retire

    async def retire(self: ReplicaDrain, within_s: float) -> None:
        await self._controller.report_unreachable(self._replica_id, True)
        await real(self, within_s)

    return [patch.object(ReplicaDrain, "retire", retire)]


def _turns_leave_retiring_replicas() -> Patches:
    """An ingress stops waiting for the turns of a draining replica."""
    real = ReplicaCalls.look

    async def look(self: ReplicaCalls) -> None:
        await real(self)
        for name, link in list(self._links.items()):
            status = self._membership.status(name)
            if status is not None and status.draining:
                link.lose(ReplicaGone(name))

    return [patch.object(ReplicaCalls, "look", look)]


def _handed_over_to_anybody() -> Patches:
    """A session that is handed over may go back to the draining replica."""

    def drain_session(self: Cluster, entry: LedgerEntry) -> bool:
        self._move_to(entry, entry.replica_id)
        return True

    return [patch.object(Cluster, "_drain_session", drain_session)]


def _heartbeats_tell_no_drain() -> Patches:
    """A controller that starts hears of no drain that began before."""
    real = ReplicaDirectory._note

    def note(self: ReplicaDirectory, status: ReplicaStatus) -> None:
        real(self, replace(status, draining=False))

    return [patch.object(ReplicaDirectory, "_note", note)]


def _drain_ends_early() -> Patches:
    """A draining replica says farewell while it has turns."""

    def end_at_once(self: ReplicaDrain) -> bool:
        if self._hand_overs is None or self._hand_overs.ended:
            return False
        self._hand_overs.ended = True
        return True

    return [patch.object(ReplicaDrain, "end_if_empty", end_at_once)]


def _moves_do_not_wait() -> Patches:
    """A session is moved by hand although it has a turn."""

    async def move(self: OrderedMoves, order: MoveSession) -> MovedSession:
        owner = await self._controller.move_session(order.session_id, order.epoch, self._replica_id, order.to)
        return MovedSession(self._replica_id, owner.replica_id, owner.epoch)

    return [patch.object(OrderedMoves, "_move", move)]


PLANNED_MUTATIONS: MappingProxyType[str, Callable[[], Patches]] = MappingProxyType(
    {
        "a draining replica's heartbeat makes it live again (point 3)": _heartbeats_end_retirement,
        "retirement is not noticed (point 3)": _retirement_is_not_noticed,
        "a retiring replica is reported lost (point 3)": _retiring_replicas_are_lost,
        "turns leave a replica that retires (point 3)": _turns_leave_retiring_replicas,
        "sessions are handed over to the one that drains (point 3)": _handed_over_to_anybody,
        "a controller that starts hears of no drain (point 3)": _heartbeats_tell_no_drain,
        "a replica that drains ends while it has turns (point 3)": _drain_ends_early,
        "a move by hand does not wait for turns": _moves_do_not_wait,
    }
)
