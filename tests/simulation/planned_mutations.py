"""Faults put back that make planned changes cost something: how a replica's end is noticed, and what it hands over."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from controllers.cluster import Cluster
from controllers.records import LedgerEntry, ReplicaStatus
from controllers.replicas import ReplicaDirectory
from serving.front.membership import Membership
from serving.front.replica_calls import ReplicaCalls
from serving.replica.replica import LLMReplica
from serving.wire.routing_errors import Members

Patches = list[Any]


def _heartbeats_end_retirement() -> Patches:
    """A replica that is to go, and says that it lives, is live again."""
    real = ReplicaDirectory._note

    def note(self: ReplicaDirectory, status: ReplicaStatus) -> None:
        real(self, status)
        self._replicas[status.replica_id].leaves = status.draining
        self._replicas[status.replica_id].unlisted_by.clear()

    return [patch.object(ReplicaDirectory, "_note", note)]


def _retirement_is_not_noticed() -> Patches:
    """Only what a router lists is looked at: one that is dropped is as before, until it says farewell."""
    real = ReplicaDirectory.members

    def members(
        self: ReplicaDirectory, ingress_id: str, listed: Collection[str], _unlisted: Collection[str]
    ) -> None:
        real(self, ingress_id, listed, ())

    return [patch.object(ReplicaDirectory, "members", members)]


def _retiring_replicas_are_lost() -> Patches:
    """A replica that Serve takes from the routers is reported as one that has died."""
    real = Membership.look

    async def look(self: Membership) -> None:
        told = set(self._told.unlisted)
        await real(self)
        for replica_id in set(self._told.unlisted) - told:
            await self._controller.report_unreachable(replica_id, True)
            self._replicas.lose(replica_id)

    return [patch.object(Membership, "look", look)]


def _turns_leave_retiring_replicas() -> Patches:
    """An ingress waits no longer for the turns of a replica that its router lists no more."""
    real = ReplicaCalls.members

    async def members(self: ReplicaCalls) -> Members | None:
        found = await real(self)
        for replica_id in () if found is None else found.unlisted:
            self.lose(replica_id)
        return found

    return [patch.object(ReplicaCalls, "members", members)]


def _handed_over_to_anybody() -> Patches:
    """A session that is handed over may come back to the replica that drains."""

    def drain_session(self: Cluster, entry: LedgerEntry) -> bool:
        self._move_to(entry, entry.replica_id)
        return True

    return [patch.object(Cluster, "_drain_session", drain_session)]


def _drained_comes_back() -> Patches:
    """A replica that drains and registers again, since it was not heard for a while, counts as new."""
    real = ReplicaDirectory.register

    def register(self: ReplicaDirectory, status: ReplicaStatus) -> None:
        self._replicas.pop(status.replica_id, None)
        real(self, replace(status, draining=False))

    return [patch.object(ReplicaDirectory, "register", register)]


def _drain_ends_early() -> Patches:
    """A replica that drains says farewell while it has turns."""

    async def hand_over(self: LLMReplica) -> None:
        await self._host.hand_over()
        if self._host._leaving and not self._drained:
            self._drained = True
            await self._host.farewell()

    return [patch.object(LLMReplica, "_hand_over", hand_over)]


PLANNED_MUTATIONS: MappingProxyType[str, Callable[[], Patches]] = MappingProxyType(
    {
        "a draining replica's heartbeat makes it live again (point 3)": _heartbeats_end_retirement,
        "retirement is not noticed (point 3)": _retirement_is_not_noticed,
        "a retiring replica is reported lost (point 3)": _retiring_replicas_are_lost,
        "turns leave a replica that retires (point 3)": _turns_leave_retiring_replicas,
        "sessions are handed over to the one that drains (point 3)": _handed_over_to_anybody,
        "a replica that drains registers as a new one (point 3)": _drained_comes_back,
        "a replica that drains ends while it has turns (point 3)": _drain_ends_early,
    }
)
