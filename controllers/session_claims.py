"""SessionClaims: which sessions of a session log that several clusters share are this cluster's. Pure logic.

Invariant: the ledger holds only sessions that this cluster opened or claimed. A session that is not in the ledger is
looked up in the log and claimed at its first turn here. So a cluster that starts beside another takes nothing before
traffic moves. A session that another cluster claims leaves the ledger when a change of it is refused, or with the next
report of the log's changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from controllers.cluster_stats import ClusterStats
from controllers.cluster_watch import ClusterWatch
from controllers.errors import ControllerError, SessionNotFound, SessionTakenOver, StaleEpoch
from controllers.ownership import OwnershipLedger
from controllers.records import LedgerEntry, SessionRecord
from controllers.session_keys import named, tenant_in
from controllers.session_log.store import SessionStore

ABANDONED_GRACE_S = 60.0
"""A session of a cluster that is gone ends this long after its timeout: the clocks of the two clusters may differ."""


class SessionClaims:
    """Keeps ledger and log in step about claims. Used by the owner of `ledger` and `store`. Every method may raise
    StoreError."""

    def __init__(
        self, ledger: OwnershipLedger, store: SessionStore, stats: ClusterStats, watch: ClusterWatch
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._stats = stats
        self._watch = watch

    def fence(self, session_id: str, epoch: int, replica_id: str | None = None) -> LedgerEntry:
        """Like OwnershipLedger.fence, but raises SessionNotFound only if the log does not have the session either, and
        SessionTakenOver if only the log has it."""
        try:
            return self._ledger.fence(session_id, epoch, replica_id)
        except SessionNotFound:
            self._find(session_id)
        raise SessionTakenOver(f"{named(session_id)} has been taken over by another cluster")

    def claimable(self, session_id: str) -> bool:
        """True if the log has this session and the ledger does not."""
        if session_id in self._ledger:
            return False
        try:
            return self._find(session_id).tenant == tenant_in(session_id)
        except SessionNotFound:
            return False

    def claim(self, session_id: str, replica_id: str) -> LedgerEntry:
        """Claims a session for the replica. Raises SessionNotFound."""
        with self._stats.timed("claim"):
            entry = self._store.claim(session_id, replica_id)
        self._stats.count("sessions_claimed")
        self._watch.claimed(entry)
        return self._ledger.add(entry)

    def load(self, session_id: str, epoch: int) -> SessionRecord:
        """A session of this cluster with its history. Raises SessionNotFound, and StaleEpoch if the log has another
        epoch than the ledger, or fewer turns: the session then leaves the ledger, and its next turn claims it."""
        known = self._ledger.get(session_id)
        with self.changing(session_id, "load") as store:
            record = store.load(session_id)
            if record.epoch != epoch or record.turns < known.turns:
                raise StaleEpoch(
                    f"the log has {named(session_id)} at epoch {record.epoch} with {record.turns} turns, not at epoch"
                    f" {epoch} with {known.turns}"
                )
            return record

    @contextmanager
    def changing(self, session_id: str, operation: str) -> Iterator[SessionStore]:
        """Lends the log for a change of a session of this cluster, which is timed as `operation`."""
        try:
            with self._stats.timed(operation):
                yield self._store
        except ControllerError as refusal:
            self.refused(session_id, refusal)
            raise

    def refused(self, session_id: str, refusal: ControllerError) -> None:
        """Notes that the log has refused a change. The session leaves the ledger if it turns out to be another
        cluster's, or closed."""
        match refusal:
            case SessionNotFound():  # another cluster took it and closed it
                self._drop(session_id)
            case SessionTakenOver():
                self._taken(session_id)
            case StaleEpoch():  # log and ledger differ: a failover of Redis lost changes of the log
                self.still_held(session_id)

    def still_held(self, session_id: str) -> bool:
        """True if the ledger has the session and the log agrees. Otherwise it leaves the ledger."""
        if session_id not in self._ledger:
            return False
        try:
            found, known = self._find(session_id), self._ledger.get(session_id)
            if (found.epoch, found.turns) == (known.epoch, known.turns):
                return True
            if (found.epoch, found.turns) < (known.epoch, known.turns):
                self._pass_epochs(known)
        except (SessionNotFound, StaleEpoch):
            pass
        self._drop(session_id)
        return False

    def _taken(self, session_id: str) -> None:
        """Drops a session that the log has as another cluster's. If a failover of Redis lost that this cluster had it
        after that one, it first becomes this cluster's again."""
        with suppress(SessionNotFound, StaleEpoch):
            known = self._ledger.get(session_id)
            if self._find(session_id).epoch < known.epoch:
                self._pass_epochs(known)
        self._drop(session_id)

    def _pass_epochs(self, known: LedgerEntry) -> None:
        """Gives a session of which a failover of Redis lost changes an epoch above those that it had. Somebody may
        still hold it at one of them, with a turn that was lost."""
        with self._stats.timed("assign"):
            found = self._store.claim(known.session_id, known.replica_id)
            for epoch in range(found.epoch + 1, known.epoch + 2):
                self._store.assign(known.session_id, found.replica_id, epoch)

    def refresh(self, expires_at_s: Callable[[LedgerEntry], float], now_s: float) -> list[str]:
        """Drops sessions that other clusters took. Claims sessions that are past their timeout and in no ledger. Those
        of clusters that are gone are returned: the caller must end them. Those of this cluster, of which the answer to
        the opening was lost, or a failover of Redis lost changes, end as all others in the ledger."""
        with self._stats.timed("changes"):
            changes = self._store.changes()
        for session_id, epoch in changes.taken:
            if session_id in self._ledger and self._ledger.get(session_id).epoch < epoch:
                self._drop(session_id)
        return [
            entry.session_id
            for entry in changes.claimable
            if expires_at_s(entry) + ABANDONED_GRACE_S < now_s and self._claim_unused(entry)
        ]

    def _claim_unused(self, found: LedgerEntry) -> bool:
        """Claims a session. False if it is this cluster's, or was used since it was read: it is then one of the
        ledger."""
        if found.session_id in self._ledger:
            return False
        try:
            entry = self.claim(found.session_id, found.replica_id)
        except SessionNotFound:
            return False
        return (entry.epoch, entry.turns) == (found.epoch + 1, found.turns)

    def _find(self, session_id: str) -> LedgerEntry:
        with self._stats.timed("find"):
            return self._store.find(session_id)

    def _drop(self, session_id: str) -> None:
        if self._ledger.expire(session_id):
            self._stats.count("sessions_taken_over")
            self._watch.closed(session_id, "another cluster has it now, or has ended it")
