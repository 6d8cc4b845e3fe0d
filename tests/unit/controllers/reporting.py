"""Heartbeats with reports as replicas send them (controllers/session_reports.py), for tests without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from controllers.cluster import Cluster
from controllers.records import HeartbeatReply, ReplicaStatus, SessionStatus
from controllers.session_reports import ReportWriter


def heartbeat(
    cluster: Cluster,
    status: ReplicaStatus,
    writer: ReportWriter,
    status_of: Callable[[str], SessionStatus | None],
    held: Callable[[], Iterable[str]],
) -> HeartbeatReply:
    """A heartbeat: reports until the cluster knows everything. A replica that hears that it counts as gone registers
    again. Returns the last reply."""
    while True:
        report = writer.next(status_of, held)
        reply = cluster.heartbeat(status, report)
        writer.answered(report, reply)
        if not reply.known:
            cluster.register_replica(status)
        if not writer.has_more:
            return reply


class HeldSessions:
    """The sessions that each replica holds, as a test says, and what the cluster has not heard of them yet."""

    def __init__(self) -> None:
        self._writers: dict[str, ReportWriter] = {}
        self._held: dict[str, dict[str, SessionStatus]] = {}

    def beat(self, cluster: Cluster, status: ReplicaStatus, *held: SessionStatus) -> HeartbeatReply:
        """A heartbeat of a replica that now holds exactly these sessions."""
        before = self._held.get(status.replica_id, {})
        told = self._held[status.replica_id] = {each.session_id: each for each in held}
        writer = self._writers.setdefault(status.replica_id, ReportWriter())
        writer.note(name for name in before | told if before.get(name) != told.get(name))
        return heartbeat(cluster, status, writer, told.get, lambda: told)
