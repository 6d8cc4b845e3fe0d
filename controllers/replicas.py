"""ReplicaDirectory: which replicas there are, and in which states. It alone decides that. Pure logic, one owner.

    LIVE ⇄ SUSPECT → GONE                  a replica that wrongly counted as gone registers again → LIVE
    either of the two → DRAINING → GONE    for good: neither heartbeats nor a registration bring it back

Its inputs are each replica's registration, heartbeats and farewell, and the front ends' reports of replicas that they
cannot reach. Time is the controller's attended time, so neither a step of the wall clock nor a pause of the controller
looks like silence. Sessions that have moved away from a replica stay moved, even if it comes back: their epoch fences
the former owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from controllers.errors import InvalidMove, NoReplica
from controllers.placement import Candidate, choose_replica
from controllers.records import ReplicaStatus


class ReplicaState(Enum):
    """A replica's state. SUSPECT: a front end cannot reach it, or it has not been heard since the controller started.
    Its heartbeats decide what comes next."""

    LIVE = "live"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


SUSPECT_BEATS = 2
"""A suspect replica that misses this many heartbeats is gone. After this many heartbeats it is live again."""
LATE_BEATS = 0.5
"""The last of them may be this late, as a share of the time between two. A heartbeat begins an interval after the
answer to the one before, so each comes later than the interval says."""

BY_PREFERENCE = (
    ReplicaState.LIVE,
    ReplicaState.SUSPECT,
    ReplicaState.DRAINING,
)
"""The order in which states get sessions: a later state only if no replica is in an earlier one. A draining replica
serves until another one can."""


@dataclass(slots=True, eq=False)
class _Replica:
    """A replica. One without a `status` was not heard yet, only reported or made to drain. `drains`: it drains since
    `drains_since_s`, by its own decision or an operator's. `beats` counts its heartbeats since a front end last failed
    to reach it. `suspect_since_s` is when the first of these failures was. `ended`: it is gone for certain. `told_end`:
    it has said farewell, or was counted as lost."""

    seen_s: float
    status: ReplicaStatus | None = None
    drains: bool = False
    suspect_since_s: float | None = None
    beats: int = 0
    ended: bool = False
    assigned_tokens: int = 0
    drains_since_s: float | None = None
    told_end: bool = False


class ReplicaDirectory:
    """Replicas by id. `clock` returns attended monotonic seconds, `count_sessions` how many sessions a replica owns.

    A replica that is silent for `timeout_s` is gone. A suspect replica is gone once SUSPECT_BEATS of its heartbeats,
    `heartbeat_s` apart, are missing.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        timeout_s: float,
        heartbeat_s: float,
        count_sessions: Callable[[str], int],
    ) -> None:
        self._clock = clock
        self._count_sessions = count_sessions
        self.configure(timeout_s, heartbeat_s)
        self._started_s = clock()
        self._replicas: dict[str, _Replica] = {}

    def configure(self, timeout_s: float, heartbeat_s: float) -> None:
        self._timeout_s = timeout_s
        self._suspect_timeout_s = min(timeout_s, (SUSPECT_BEATS + LATE_BEATS) * heartbeat_s)

    def register(self, status: ReplicaStatus) -> None:
        """Registers a replica, for the first time or again. A draining replica goes on draining."""
        known = self._replicas.get(status.replica_id)
        if known is None or known.ended or self.state(status.replica_id) is ReplicaState.GONE:
            drains = known is not None and known.drains
            since_s = None if known is None else known.drains_since_s
            self._replicas[status.replica_id] = _Replica(self._clock(), drains=drains, drains_since_s=since_s)
        self._note(status)

    def heartbeat(self, status: ReplicaStatus) -> bool:
        """Notes a sign of life. False, and nothing noted, if the replica counts as gone: it must register again."""
        known = self._replicas.get(status.replica_id)
        if known is not None:
            if self.state(status.replica_id) is ReplicaState.GONE:
                known.ended = True
                return False
            known.beats += 1
            if known.beats >= SUSPECT_BEATS:
                known.suspect_since_s = None
        self._note(status)
        return True

    def unreachable(self, replica_id: str, *, died: bool) -> ReplicaState:
        """Notes that a front end could not reach a replica. `died`: its process has certainly ended. Returns its state.

        A replica that cannot be reached for `timeout_s` is gone even if its heartbeats arrive: they take another way.
        """
        known = self._replicas.setdefault(replica_id, _Replica(self._clock()))
        known.beats = 0
        if known.suspect_since_s is None:
            known.suspect_since_s = self._clock()
        known.ended |= died or self._clock() - known.suspect_since_s > self._timeout_s
        return self.state(replica_id)

    def drain(self, replica_id: str) -> None:
        """Makes the replica drain, by its own decision or an operator's. It need not be known yet."""
        known = self._replicas.setdefault(replica_id, _Replica(self._clock()))
        known.drains = True
        self._note_drain(known)

    def order_drain(self, replica_id: str) -> None:
        """Makes the replica drain on an operator's order. Raises NoReplica, and changes nothing, if no other live
        replica could take its sessions."""
        if all(status.replica_id == replica_id for status in self.in_state(ReplicaState.LIVE)):
            raise NoReplica(f"no other live replica could take the sessions of {replica_id!r}")
        self.drain(replica_id)

    def deregister(self, replica_id: str) -> float | None:
        """Notes the replica's farewell: it answers nothing any more. Returns how long it drained (None: it did not, or
        its farewell is a repeated one)."""
        known = self._replicas.get(replica_id)
        if known is None:
            return None
        again = known.told_end
        known.told_end = again or known.status is None or not known.status.fault
        known.drains = known.ended = True
        return None if again or known.drains_since_s is None else self._clock() - known.drains_since_s

    def newly_lost(self) -> int:
        """How many more replicas are gone without a farewell, or because of a fault, since the last call."""
        lost = [
            known
            for replica_id, known in self._replicas.items()
            if not known.told_end and known.status is not None and self.state(replica_id) is ReplicaState.GONE
        ]
        for known in lost:
            known.told_end = True
        return len(lost)

    def state(self, replica_id: str) -> ReplicaState:
        """The replica's state. A replica that was never heard is SUSPECT for `timeout_s` after the directory's start,
        so that a restart of the controller does not move every session. After that it is GONE."""
        known = self._replicas.get(replica_id)
        if known is None:
            late = self._clock() - self._started_s > self._timeout_s
            return ReplicaState.GONE if late else ReplicaState.SUSPECT
        suspect = known.suspect_since_s is not None
        silence_s = self._clock() - known.seen_s
        if known.ended or silence_s > (self._suspect_timeout_s if suspect else self._timeout_s):
            return ReplicaState.GONE
        if known.drains:
            return ReplicaState.DRAINING
        return ReplicaState.SUSPECT if suspect else ReplicaState.LIVE

    def states(self) -> dict[str, ReplicaState]:
        """The states of all known replicas, including those that are gone."""
        return {replica_id: self.state(replica_id) for replica_id in self._replicas}

    @property
    def all_heard(self) -> bool:
        """Whether each replica that is there has had the time for two heartbeats since the directory's start."""
        return self._clock() - self._started_s >= self._suspect_timeout_s

    def ended(self, replica_id: str) -> bool:
        """True if the replica is gone for certain. A replica that is only silent may be slow."""
        known = self._replicas.get(replica_id)
        return known is not None and known.ended

    def unheard(self, replica_id: str) -> bool:
        """True if nothing of the replica's own was heard since the directory's start, or it was forgotten since."""
        known = self._replicas.get(replica_id)
        return known is None or known.status is None

    def gone(self, replica_id: str) -> bool:
        """True if the replica counts as gone, so that its sessions should move."""
        return self.state(replica_id) is ReplicaState.GONE

    def silence_s(self, replica_id: str) -> float:
        """How long nothing was heard of the replica. If it is unknown, that is since the directory's start."""
        known = self._replicas.get(replica_id)
        return self._clock() - (self._started_s if known is None else known.seen_s)

    def assign_tokens(self, replica_id: str, tokens: int) -> None:
        """Counts the KV that a session placed at the replica may take, until the replica's next heartbeat."""
        if replica_id in self._replicas:
            self._replicas[replica_id].assigned_tokens += tokens

    def candidates(self, states: Sequence[ReplicaState] = BY_PREFERENCE) -> list[Candidate]:
        """The replicas for placement: those in the first of `states` that has any. Replicas that drain next get none if
        there are others."""
        for state in states:
            statuses = self.in_state(state)
            found = [
                Candidate(
                    replica_id=status.replica_id,
                    free_tokens=status.free_tokens,
                    assigned_tokens=self._replicas[status.replica_id].assigned_tokens,
                    sessions=status.sessions,
                )
                for status in self._lasting(statuses)
            ]
            if found:
                return found
        return []

    def taker(self, to: str | None, owner_id: str) -> str:
        """The live replica that gets a session of `owner_id`: `to` (None: the best of the others). Raises InvalidMove
        if there is no replica `to`, and NoReplica if it takes no sessions, or if no replica does."""
        if to is None:
            live = self.candidates((ReplicaState.LIVE,))
            return choose_replica(each for each in live if each.replica_id != owner_id)
        state = self.state(to)
        if to not in self._replicas or state is ReplicaState.GONE:
            raise InvalidMove(f"to: there is no replica {to!r}")
        if state is not ReplicaState.LIVE:
            raise NoReplica(f"to: replica {to!r} takes no sessions, it is {state.value}", "to")
        return to

    def in_state(self, *states: ReplicaState) -> list[ReplicaStatus]:
        """The last reports of replicas in these states. `draining` is set if they drain for any reason, and `sessions`
        are those that they own."""
        return [
            replace(known.status, draining=known.drains, sessions=self._count_sessions(replica_id))
            for replica_id, known in self._replicas.items()
            if known.status is not None and self.state(replica_id) in states
        ]

    def present(self) -> list[ReplicaStatus]:
        """The last reports of replicas that are not gone."""
        return self.in_state(*(state for state in ReplicaState if state is not ReplicaState.GONE))

    def settled(self, within_s: float) -> list[ReplicaStatus]:
        """The last reports of live replicas, if not older than `within_s`: a replica that is late may be in trouble.
        Without those that drain next, if there are others."""
        oldest_s = self._clock() - within_s
        live = self.in_state(ReplicaState.LIVE)
        return [status for status in self._lasting(live) if status.seen_s >= oldest_s]

    def forget_silent(self, after_s: float) -> None:
        """Forgets replicas that were silent for `after_s`. Replica ids are not reused."""
        oldest_s = self._clock() - after_s
        self._replicas = {name: known for name, known in self._replicas.items() if known.seen_s >= oldest_s}

    def _lasting(self, statuses: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
        """Those that do not drain next: in a rolling update, replicas with the settings of a draining one do. All, if
        there are no others: then it may be no rolling update."""
        outgoing = {status.settings_hash for status in self.in_state(ReplicaState.DRAINING)}
        return [status for status in statuses if status.settings_hash not in outgoing] or list(statuses)

    def _note(self, status: ReplicaStatus) -> None:
        known = self._replicas.setdefault(status.replica_id, _Replica(self._clock()))
        known.seen_s = self._clock()
        known.status = replace(status, seen_s=known.seen_s)
        known.drains |= status.draining
        self._note_drain(known)
        known.assigned_tokens = 0

    def _note_drain(self, known: _Replica) -> None:
        if known.drains and known.drains_since_s is None:
            known.drains_since_s = self._clock()
