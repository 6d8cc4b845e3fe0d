"""Faults put back into the failure detector: what it takes for a death, and what it forgives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from controllers.attended_clock import AttendedClock
from controllers.cluster import Cluster
from controllers.records import ReplicaStatus
from controllers.replicas import ReplicaDirectory, ReplicaState
from serving.replica.reported_sessions import ReportedSessions

Patches = list[Any]


def _pauses_count() -> Patches:
    """The controller counts its own pauses as silence of the replicas."""
    return [patch.object(AttendedClock, "__call__", lambda self: self._timer())]


def _clock_steps_count() -> Patches:
    """The silence of replicas is measured with the wall clock, which may be set."""
    real = Cluster.__init__

    def init(self: Cluster, settings: Any, store: Any, clock: Callable[[], float], timer: Any) -> None:
        real(self, settings, store, clock, timer)
        self._replicas._clock = clock
        self._replicas._started_s = clock()

    return [patch.object(Cluster, "__init__", init)]


def _heartbeats_wait_for_the_engine() -> Patches:
    """A slow step looks like a death: a heartbeat waits for the engine, which answers only between two steps."""

    async def look_at_kv(self: ReportedSessions) -> None:
        self._kv_tokens = await asyncio.wrap_future(self._engine.session_kv_tokens())

    return [patch.object(ReportedSessions, "_look_at_kv", look_at_kv)]


def _suspects_stay_suspect() -> Patches:
    """Heartbeats do not clear a replica that a caller once could not reach."""
    real = ReplicaDirectory.heartbeat

    def heartbeat(self: ReplicaDirectory, status: ReplicaStatus) -> bool:
        known = self._replicas.get(status.replica_id)
        if known is not None:
            known.beats = -1
        return real(self, status)

    return [patch.object(ReplicaDirectory, "heartbeat", heartbeat)]


def _one_report_is_death() -> Patches:
    """A replica that one ingress cannot reach counts as gone, whatever its heartbeats say."""
    real = ReplicaDirectory.unreachable

    def unreachable(self: ReplicaDirectory, replica_id: str, *, died: bool) -> ReplicaState:  # noqa: ARG001
        return real(self, replica_id, died=True)

    return [patch.object(ReplicaDirectory, "unreachable", unreachable)]


def _restarts_forget_owners() -> Patches:
    """A controller that has just started takes replicas for gone that it has not heard from."""
    real = ReplicaDirectory.__init__

    def init(self: ReplicaDirectory, clock: Any, timeout_s: float, *rest: Any) -> None:
        real(self, clock, timeout_s, *rest)
        self._started_s = clock() - 2 * timeout_s

    return [patch.object(ReplicaDirectory, "__init__", init)]


def _gone_for_ever() -> Patches:
    """A replica that was taken for gone by mistake may not register again."""
    real = ReplicaDirectory.register

    def register(self: ReplicaDirectory, status: ReplicaStatus) -> None:
        known = self._replicas.get(status.replica_id)
        if known is None or not known.ended:
            real(self, status)

    return [patch.object(ReplicaDirectory, "register", register)]


DETECTOR_MUTATIONS: MappingProxyType[str, Callable[[], Patches]] = MappingProxyType(
    {
        "the controller's own pause counts against replicas (point 4)": _pauses_count,
        "a step of the clock counts against replicas (point 4)": _clock_steps_count,
        "a heartbeat waits for the engine's step (point 4)": _heartbeats_wait_for_the_engine,
        "a suspect replica that answers is not restored (point 4)": _suspects_stay_suspect,
        "one ingress's report is a death (point 4)": _one_report_is_death,
        "a controller that starts takes everybody for gone (point 4)": _restarts_forget_owners,
        "who was taken for gone by mistake stays so (point 4)": _gone_for_ever,
    }
)
