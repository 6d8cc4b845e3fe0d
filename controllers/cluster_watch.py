"""ClusterWatch: the view of the cluster for watchers: its sessions in use, its replicas, and events of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

from controllers.event_log import EventLog
from controllers.ownership import OwnershipLedger
from controllers.records import ClusterView, LedgerEntry
from controllers.replicas import ReplicaDirectory, ReplicaState

_IS_THERE = frozenset({ReplicaState.LIVE, ReplicaState.SUSPECT, ReplicaState.DRAINING})
SAID_STATES = MappingProxyType({state: state.value for state in ReplicaState} | {ReplicaState.LIVE: "up"})


class ClusterWatch:
    """Reads the cluster's `ledger` and `replicas`, and owns the events. `clock` returns Unix time."""

    def __init__(
        self, ledger: OwnershipLedger, replicas: ReplicaDirectory, clock: Callable[[], float]
    ) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self._seen: dict[str, ReplicaState] = {}
        self.events = EventLog(clock)

    def look(self, why_gone: str = "not heard of any more") -> None:
        """Notes events of replicas that have come, gone or begun to drain since the last look. O(replicas)."""
        states = self._replicas.states()
        for replica_id, state in states.items():
            before = self._seen.get(replica_id)
            if state in _IS_THERE and before not in _IS_THERE:
                self.events.note("replica_up", replica_id=replica_id)
            if state is ReplicaState.DRAINING and before is not state:
                self.events.note("drained", replica_id=replica_id, detail="hands its sessions over, and goes")
            if state is ReplicaState.GONE and before in _IS_THERE:
                self.events.note("replica_down", replica_id=replica_id, detail=why_gone)
        self._seen = states

    def opened(self, entry: LedgerEntry, detail: str = "") -> None:
        self.events.note("opened", entry.session_id, entry.replica_id, detail=detail)

    def moved(self, entry: LedgerEntry, to_replica_id: str, why: str) -> None:
        """Notes a move. `entry` is the session's entry before the move."""
        self.events.note("moved", entry.session_id, entry.replica_id, to_replica_id, why)

    def taken_over(self, entry: LedgerEntry, to_replica_id: str) -> None:
        """Notes a takeover: the session's owner is gone. The event of that replica comes before those of its
        sessions."""
        self.look()
        self.events.note("taken_over", entry.session_id, entry.replica_id, to_replica_id, "its owner is gone")

    def claimed(self, entry: LedgerEntry) -> None:
        self.events.note(
            "taken_over", entry.session_id, None, entry.replica_id, "it was another cluster's, or nobody's"
        )

    def closed(self, session_id: str, why: str) -> None:
        self.events.note("closed", session_id, detail=why)

    def told(self, entry: LedgerEntry) -> LedgerEntry:
        """The entry as it is told: what an owner that is gone has reported is no longer so."""
        gone = (entry.size_bytes or entry.in_turn) and self._replicas.gone(entry.replica_id)
        return replace(entry, size_bytes=0, in_turn=False) if gone else entry

    def view(self, after: str | None, limit: int) -> ClusterView:
        """The current state, and the events after the cursor `after`. O(limit + replicas)."""
        self.look()
        events, cursor = self.events.after(after)
        return ClusterView(
            sessions=len(self._ledger),
            recent=tuple(map(self.told, self._ledger.recent(limit))),
            states={name: SAID_STATES[state] for name, state in self._seen.items()},
            events=events,
            cursor=cursor,
        )
