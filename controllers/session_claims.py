"""SessionClaims: of a session log that several clusters share, which sessions are this cluster's. Pure logic.

Invariant: the ledger holds only sessions that this cluster opened or claimed. A session that is not there is looked
for in the log and claimed at its first turn here, so a cluster that starts beside another takes nothing before traffic
moves. What another claims from this cluster leaves the ledger when a change of it is refused, or with the next
changes that the log tells of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from controllers.cluster_stats import ClusterStats
from controllers.cluster_watch import ClusterWatch
from controllers.errors import SessionNotFound, SessionTakenOver, StaleEpoch
from controllers.ownership import OwnershipLedger
from controllers.records import LedgerEntry
from controllers.session_keys import named, tenant_in
from controllers.store import SessionStore

ABANDONED_GRACE_S = 60.0
"""Beyond its timeout, for a session of a cluster that is gone: the clocks of the two may differ."""


class SessionClaims:
    """Used by the owner of `ledger` and `store`. Every method may raise StoreError."""

    def __init__(
        self, ledger: OwnershipLedger, store: SessionStore, stats: ClusterStats, watch: ClusterWatch
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._stats = stats
        self._watch = watch

    def fence(self, session_id: str, epoch: int, replica_id: str | None = None) -> LedgerEntry:
        """As the ledger's. Raises SessionNotFound only if the log does not have the session either."""
        try:
            return self._ledger.fence(session_id, epoch, replica_id)
        except SessionNotFound:
            self._find(session_id)
        raise SessionTakenOver(f"{named(session_id)} has been taken over by another cluster")

    def claimable(self, session_id: str) -> bool:
        """True if the log has a session that the ledger does not."""
        if session_id in self._ledger:
            return False
        try:
            return self._find(session_id).tenant == tenant_in(session_id)
        except SessionNotFound:
            return False

    def claim(self, session_id: str, replica_id: str) -> LedgerEntry:
        """Takes a claimable session, for the replica. Raises SessionNotFound."""
        with self._stats.timed("claim"):
            entry = self._store.claim(session_id, replica_id)
        self._stats.count("sessions_claimed")
        self._watch.claimed(entry)
        return self._ledger.add(entry)

    @contextmanager
    def changing(self, session_id: str) -> Iterator[None]:
        """Around what needs the session to be this cluster's: it leaves the ledger if it is not any more."""
        try:
            yield
        except (SessionTakenOver, SessionNotFound):  # or it was closed there
            self._drop(session_id)
            raise
        except StaleEpoch:  # of whom the ledger took for the owner: a failover of Redis lost what the log had
            self.still_held(session_id)
            raise

    def still_held(self, session_id: str) -> bool:
        """True if the ledger has the session, and the log agrees. Else it leaves the ledger."""
        if session_id not in self._ledger:
            return False
        try:
            found, known = self._find(session_id), self._ledger.get(session_id)
            if (found.epoch, found.turns) == (known.epoch, known.turns):
                return True
        except SessionNotFound:
            pass
        self._drop(session_id)
        return False

    def refresh(self, expires_at_s: Callable[[LedgerEntry], float], now_s: float) -> list[str]:
        """Lets go of what others took. Claims the sessions of clusters that are gone which are past their timeout, and
        returns them: they are to be ended."""
        with self._stats.timed("changes"):
            changes = self._store.changes()
        for session_id, epoch in changes.taken:
            if session_id in self._ledger and self._ledger.get(session_id).epoch < epoch:
                self._drop(session_id)
        return [
            entry.session_id
            for entry in changes.abandoned
            if expires_at_s(entry) + ABANDONED_GRACE_S < now_s and self._claim_unused(entry)
        ]

    def _claim_unused(self, abandoned: LedgerEntry) -> bool:
        """False if it was used since it was read: then it stays open."""
        if abandoned.session_id in self._ledger:
            return False
        try:
            entry = self.claim(abandoned.session_id, abandoned.replica_id)
        except SessionNotFound:
            return False
        return (entry.epoch, entry.turns) == (abandoned.epoch + 1, abandoned.turns)

    def _find(self, session_id: str) -> LedgerEntry:
        with self._stats.timed("find"):
            return self._store.find(session_id)

    def _drop(self, session_id: str) -> None:
        if self._ledger.expire(session_id):
            self._stats.count("sessions_taken_over")
            self._watch.closed(session_id, "another cluster has it now, or has ended it")
