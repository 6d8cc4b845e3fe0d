"""ReplicaDirectory: which replicas are alive, as their heartbeats tell. Pure logic, one owner.

A replica that was reported lost stays dead until it registers again; one that fell silent comes back by
itself with its next heartbeat. Sessions moved away meanwhile stay moved: their epoch fences the former owner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controllers.placement import Candidate
from controllers.records import ReplicaStatus


class ReplicaDirectory:
    """Replicas by id. `clock` returns seconds; a replica unheard of for `timeout_s` counts as dead."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._started_s = clock()
        self._statuses: dict[str, ReplicaStatus] = {}
        self._assigned_tokens: dict[str, int] = {}
        self._lost: dict[str, float] = {}

    def configure(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def register(self, status: ReplicaStatus) -> None:
        """Makes the replica placeable, whatever was known of it."""
        self._lost.pop(status.replica_id, None)
        self._note(status)

    def heartbeat(self, status: ReplicaStatus) -> bool:
        """Notes a sign of life. False, and nothing noted, if the replica was reported lost."""
        if status.replica_id in self._lost:
            return False
        self._note(status)
        return True

    def report_lost(self, replica_id: str) -> None:
        """Counts the replica as dead from now on, until it registers again."""
        self._lost[replica_id] = self._clock()
        self._statuses.pop(replica_id, None)
        self._assigned_tokens.pop(replica_id, None)

    def alive(self, replica_id: str) -> bool:
        status = self._statuses.get(replica_id)
        return status is not None and self._clock() - status.seen_s <= self._timeout_s

    def lost(self, replica_id: str) -> bool:
        """True if the replica was reported lost and has not registered since."""
        return replica_id in self._lost

    def gone(self, replica_id: str) -> bool:
        """True if the replica is lost or silent, so that sessions it owns should move.

        A replica never heard of is given `timeout_s` after the directory's start to show up: a restart of the
        controller must not move every session.
        """
        if replica_id in self._lost:
            return True
        if replica_id in self._statuses:
            return not self.alive(replica_id)
        return self._clock() - self._started_s > self._timeout_s

    def draining(self, replica_id: str) -> bool:
        status = self._statuses.get(replica_id)
        return status is not None and status.draining

    def assign_tokens(self, replica_id: str, tokens: int) -> None:
        """Counts KV that a session placed there may take, until the replica's next heartbeat."""
        self._assigned_tokens[replica_id] = self._assigned_tokens.get(replica_id, 0) + tokens

    def candidates(self, count_sessions: Callable[[str], int]) -> list[Candidate]:
        """Live replicas, for placement. `count_sessions` gives the sessions owned by a replica id."""
        return [
            Candidate(
                replica_id=replica_id,
                free_tokens=status.free_tokens,
                assigned_tokens=self._assigned_tokens.get(replica_id, 0),
                sessions=count_sessions(replica_id),
                draining=status.draining,
            )
            for replica_id, status in self._statuses.items()
            if self.alive(replica_id)
        ]

    def live(self) -> list[ReplicaStatus]:
        return [status for status in self._statuses.values() if self.alive(status.replica_id)]

    def forget_silent(self, after_s: float) -> None:
        """Drops what is kept of replicas not heard of for `after_s`. Replica ids are not reused."""
        oldest_s = self._clock() - after_s
        self._lost = {rid: lost_s for rid, lost_s in self._lost.items() if lost_s >= oldest_s}
        for replica_id in [rid for rid, status in self._statuses.items() if status.seen_s < oldest_s]:
            del self._statuses[replica_id]
            self._assigned_tokens.pop(replica_id, None)

    def _note(self, status: ReplicaStatus) -> None:
        self._statuses[status.replica_id] = replace(status, seen_s=self._clock())
        self._assigned_tokens.pop(status.replica_id, None)
