"""ReplicaDirectory: which replicas are there, and may have what. Pure logic, one owner; nobody else decides it.

    JOINING → LIVE ⇄ SUSPECT → GONE        a replica that was taken for gone by mistake registers again → LIVE
    any of the three → DRAINING → GONE     for good: neither heartbeats nor a registration bring it back

Observers feed it: a replica's own registration, heartbeats and farewell; front ends, which tell what they cannot reach.
Time is the controller's attended time, so neither a step of the wall clock nor a pause of the controller looks like
silence. Sessions that moved away from a replica taken for gone stay moved: their epoch fences the former owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from controllers.errors import InvalidMove, NoReplica
from controllers.placement import Candidate, choose_replica
from controllers.records import ReplicaStatus


class ReplicaState(Enum):
    """JOINING: it may be there, and has not been heard since the controller began. SUSPECT: somebody cannot reach it,
    its heartbeats decide."""

    JOINING = "joining"
    LIVE = "live"
    SUSPECT = "suspect"
    DRAINING = "draining"
    GONE = "gone"


SUSPECT_BEATS = 2
"""A suspect that misses so many heartbeats is gone; after so many more it is trusted again."""

BY_PREFERENCE = (
    ReplicaState.LIVE,
    ReplicaState.JOINING,
    ReplicaState.SUSPECT,
    ReplicaState.DRAINING,
)
"""Who gets a session: the later ones only where there is no better. One that drains serves until another can."""


@dataclass(slots=True, eq=False)
class _Replica:
    """`drains`: it is to go, by its own word or an operator's, and does so since `drains_since_s`. `beats` counts its
    heartbeats since somebody last failed to reach it, `suspect_since_s` since when they do. `told_end`: it has said
    farewell, or was counted as lost."""

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
    """Replicas by id. `clock` returns attended monotonic seconds.

    A replica unheard of for `timeout_s` is gone; a suspect one after SUSPECT_BEATS × `heartbeat_s`.
    """

    def __init__(self, clock: Callable[[], float], timeout_s: float, heartbeat_s: float) -> None:
        self._clock = clock
        self.configure(timeout_s, heartbeat_s)
        self._started_s = clock()
        self._replicas: dict[str, _Replica] = {}

    def configure(self, timeout_s: float, heartbeat_s: float) -> None:
        self._timeout_s = timeout_s
        self._suspect_timeout_s = min(timeout_s, SUSPECT_BEATS * heartbeat_s)

    def register(self, status: ReplicaStatus) -> None:
        """A replica makes itself known, or known again. One that drains goes on draining."""
        known = self._replicas.get(status.replica_id)
        if known is None or known.ended or self.state(status.replica_id) is ReplicaState.GONE:
            drains = known is not None and known.drains
            since_s = None if known is None else known.drains_since_s
            self._replicas[status.replica_id] = _Replica(self._clock(), drains=drains, drains_since_s=since_s)
        self._note(status)

    def heartbeat(self, status: ReplicaStatus) -> bool:
        """Notes a sign of life. False, and nothing noted, if the replica counts as gone: it has to register."""
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
        """Somebody could not reach it; `died`: its process has ended for certain. Returns what it counts as now.

        Who cannot be reached for as long as `timeout_s` is gone, whatever its heartbeats say: they take another way.
        """
        known = self._replicas.setdefault(replica_id, _Replica(self._clock()))
        known.beats = 0
        if known.suspect_since_s is None:
            known.suspect_since_s = self._clock()
        known.ended |= died or self._clock() - known.suspect_since_s > self._timeout_s
        return self.state(replica_id)

    def drain(self, replica_id: str) -> None:
        """It is to go, by its own word or an operator's. One that is not known yet is to go, too."""
        known = self._replicas.setdefault(replica_id, _Replica(self._clock()))
        known.drains = True
        self._note_drain(known)

    def order_drain(self, replica_id: str) -> None:
        """An operator's word. Raises NoReplica, and changes nothing, where nobody else could take its sessions."""
        if all(status.replica_id == replica_id for status in self.in_state(ReplicaState.LIVE)):
            raise NoReplica(f"no other live replica could take the sessions of {replica_id!r}")
        self.drain(replica_id)

    def deregister(self, replica_id: str) -> float | None:
        """It says farewell: it answers nothing any more. Gives how long it drained; None if it did not, or had said so
        before."""
        known = self._replicas.get(replica_id)
        if known is None:
            return None
        again = known.told_end
        known.told_end = again or known.status is None or not known.status.fault
        known.drains = known.ended = True
        return None if again or known.drains_since_s is None else self._clock() - known.drains_since_s

    def newly_lost(self) -> int:
        """Of the replicas that are gone without a farewell, or for a fault, those that were not counted yet."""
        lost = [
            known
            for replica_id, known in self._replicas.items()
            if not known.told_end and known.status is not None and self.state(replica_id) is ReplicaState.GONE
        ]
        for known in lost:
            known.told_end = True
        return len(lost)

    def state(self, replica_id: str) -> ReplicaState:
        """One never heard of is JOINING for `timeout_s` from the directory's start, since a restart of the controller
        must not move every session; then it is GONE."""
        known = self._replicas.get(replica_id)
        if known is None:
            late = self._clock() - self._started_s > self._timeout_s
            return ReplicaState.GONE if late else ReplicaState.JOINING
        suspect = known.suspect_since_s is not None
        silence_s = self._clock() - known.seen_s
        if known.ended or silence_s > (self._suspect_timeout_s if suspect else self._timeout_s):
            return ReplicaState.GONE
        if known.drains:
            return ReplicaState.DRAINING
        if suspect:
            return ReplicaState.SUSPECT
        return ReplicaState.LIVE if known.status is not None else ReplicaState.JOINING

    def states(self) -> dict[str, ReplicaState]:
        """Of all that are known, those that are gone among them."""
        return {replica_id: self.state(replica_id) for replica_id in self._replicas}

    def ended(self, replica_id: str) -> bool:
        """True if it is gone for certain. One that is only silent may be slow, and is better asked than nobody."""
        known = self._replicas.get(replica_id)
        return known is not None and known.ended

    def gone(self, replica_id: str) -> bool:
        """True if sessions that it owns should move."""
        return self.state(replica_id) is ReplicaState.GONE

    def silence_s(self, replica_id: str) -> float:
        """For how long nothing was heard of it. Of one that is not known: since there is anybody who could hear it."""
        known = self._replicas.get(replica_id)
        return self._clock() - (self._started_s if known is None else known.seen_s)

    def assign_tokens(self, replica_id: str, tokens: int) -> None:
        """Counts KV that a session placed there may take, until the replica's next heartbeat."""
        if replica_id in self._replicas:
            self._replicas[replica_id].assigned_tokens += tokens

    def candidates(
        self, count_sessions: Callable[[str], int], states: Sequence[ReplicaState] = BY_PREFERENCE
    ) -> list[Candidate]:
        """Replicas for placement, of the first of `states` that any is in. `count_sessions` gives the sessions of an
        id.

        In a rolling update those that have the settings of one that drains are to go next: they get sessions only
        where no others are.
        """
        outgoing = {status.settings_hash for status in self.in_state(ReplicaState.DRAINING)}
        for state in states:
            statuses = self.in_state(state)
            lasting = [status for status in statuses if status.settings_hash not in outgoing]
            found = [
                Candidate(
                    replica_id=status.replica_id,
                    free_tokens=status.free_tokens,
                    assigned_tokens=self._replicas[status.replica_id].assigned_tokens,
                    sessions=count_sessions(status.replica_id),
                )
                for status in lasting or statuses
            ]
            if found:
                return found
        return []

    def taker(self, to: str | None, owner_id: str, count_sessions: Callable[[str], int]) -> str:
        """The live replica that gets a session of `owner_id`: `to`, or the best of the others. Raises InvalidMove if
        `to` is not there, and NoReplica if it takes no sessions, or nobody does."""
        if to is None:
            live = self.candidates(count_sessions, (ReplicaState.LIVE,))
            return choose_replica(each for each in live if each.replica_id != owner_id)
        state = self.state(to)
        if to not in self._replicas or state is ReplicaState.GONE:
            raise InvalidMove(f"to: there is no replica {to!r}")
        if state is not ReplicaState.LIVE:
            raise NoReplica(f"to: replica {to!r} takes no sessions, it is {state.value}", "to")
        return to

    def in_state(self, *states: ReplicaState) -> list[ReplicaStatus]:
        """The last reports of replicas in these states; `draining` says that they drain, for whatever reason."""
        return [
            replace(known.status, draining=known.drains)
            for replica_id, known in self._replicas.items()
            if known.status is not None and self.state(replica_id) in states
        ]

    def present(self) -> list[ReplicaStatus]:
        """All that are not gone."""
        return self.in_state(*(state for state in ReplicaState if state is not ReplicaState.GONE))

    def recent(self, within_s: float) -> list[ReplicaStatus]:
        """Live ones that reported so lately. Who is late may be in trouble."""
        oldest_s = self._clock() - within_s
        return [status for status in self.in_state(ReplicaState.LIVE) if status.seen_s >= oldest_s]

    def forget_silent(self, after_s: float) -> None:
        """Drops what is kept of replicas not heard of for `after_s`. Replica ids are not reused."""
        oldest_s = self._clock() - after_s
        self._replicas = {name: known for name, known in self._replicas.items() if known.seen_s >= oldest_s}

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
