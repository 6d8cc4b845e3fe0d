"""SessionOpenings: adds new sessions and forks, to the log and then to the ledger, if there is room for one more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controllers.admission import admit_session, admit_timeout, admit_to_tenant
from controllers.cluster_stats import ClusterStats
from controllers.cluster_watch import ClusterWatch
from controllers.ownership import OwnershipLedger
from controllers.records import ForkedHistory, ForkOrder, LedgerEntry, SessionRecord
from controllers.replicas import ReplicaDirectory
from controllers.session_claims import SessionClaims
from controllers.session_ends import SessionEnds
from controllers.session_keys import id_in
from controllers.session_log.log_rules import check_fork
from controllers.session_log.store import SessionStore
from controllers.session_log.turn_notes import inherited
from controllers.settings import ClusterSettings
from controllers.tokens import TOKEN_BYTES

FIRST_EPOCH = 1


class SessionOpenings:
    """Used by the owner of all these parts, which also sets `settings`. `clock` returns Unix time in seconds."""

    def __init__(
        self,
        settings: ClusterSettings,
        ledger: OwnershipLedger,
        claims: SessionClaims,
        replicas: ReplicaDirectory,
        ends: SessionEnds,
        store: SessionStore,
        stats: ClusterStats,
        watch: ClusterWatch,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self._ledger = ledger
        self._claims = claims
        self._replicas = replicas
        self._ends = ends
        self._store = store
        self._stats = stats
        self._watch = watch
        self._clock = clock

    def open(
        self,
        key: str,
        tenant: str,
        timeout_s: float | None,
        capacity_tokens: int | None,
        open_key: str | None,
        place: Callable[[], str],
    ) -> LedgerEntry:
        """Opens a session without history at the replica that `place` names. Raises SessionExists, InvalidTimeout,
        Overloaded, and what `place` raises."""
        self._admit(tenant, timeout_s)
        record = SessionRecord(
            session_id=key,
            tenant=tenant,
            epoch=FIRST_EPOCH,
            replica_id=place(),
            timeout_s=timeout_s,
            capacity_tokens=capacity_tokens,
            created_s=self._clock(),
            open_key=open_key,
        )
        with self._stats.timed("open"):
            record = self._store.open(record)
        self._stats.count("sessions_opened")
        entry = self._ledger.open(record)
        self._opened(entry)
        return entry

    def fork(self, parent: LedgerEntry, order: ForkOrder, length: int) -> None:
        """Opens the child of a session of this log, with the parent's first `length` tokens. Raises SessionExists,
        InvalidFork, InvalidTimeout and Overloaded."""
        child = self._child(parent.record(), order, length)
        with self._claims.changing(parent.session_id, "fork") as store:
            forked = store.fork(parent.session_id, length, child)
        self._forked(forked, parent.session_id)

    def copy_for_fork(self, parent: LedgerEntry, length: int) -> ForkedHistory:
        """The parent's first `length` tokens for the log of another shard. Raises InvalidFork."""
        check_fork(parent.tokens, length)
        record = self._claims.load(parent.session_id, parent.epoch)
        with self._stats.timed("notes"):
            notes = inherited(self._store.notes(parent.session_id), record, length)
        history = record.history[: length * TOKEN_BYTES]
        return ForkedHistory(replace(record, history=history, results=(), checkpoints=()), tuple(notes))

    def fork_of_copy(self, copy: ForkedHistory, order: ForkOrder) -> None:
        """Opens the child of a session of another log, with the copy. Raises what `fork` raises."""
        child = self._child(copy.parent, order, copy.parent.num_tokens)
        child = replace(child, history=copy.parent.history, tools=copy.parent.tools, model=copy.parent.model)
        with self._stats.timed("fork"):
            forked = LedgerEntry.of(self._store.open(child, copy.notes), self._clock())
        self._forked(forked, copy.parent.session_id)

    def _child(self, parent: SessionRecord, order: ForkOrder, length: int) -> SessionRecord:
        self._admit(parent.tenant, order.timeout_s, copied_tokens=length)
        return SessionRecord(
            session_id=order.child_id,
            tenant=parent.tenant,
            epoch=FIRST_EPOCH,
            replica_id=parent.replica_id,
            timeout_s=parent.timeout_s if order.timeout_s is None else order.timeout_s,
            capacity_tokens=parent.capacity_tokens,
            created_s=self._clock(),
            open_key=order.fork_key,
        )

    def _forked(self, child: LedgerEntry, parent_id: str) -> None:
        self._stats.count("sessions_forked")
        self._ledger.add(child)
        self._opened(child, f"fork of {id_in(parent_id)}, {child.tokens} tokens")

    def _opened(self, entry: LedgerEntry, detail: str = "") -> None:
        self._replicas.assign_tokens(entry.replica_id, self.settings.placement_tokens)
        self._watch.opened(entry, detail)

    def _admit(self, tenant: str, timeout_s: float | None, copied_tokens: int = 0) -> None:
        """Raises InvalidTimeout, and Overloaded if neither the cluster nor the tenant may have another session."""
        settings, now_s = self.settings, self._clock()
        admit_timeout(timeout_s, settings)
        if len(self._ledger) >= settings.max_sessions and now_s >= self._ends.next_expiry_s:
            self._ends.expire_idle(settings.replica_timeout_s)
        admit_to_tenant(self._ledger.use_of_tenant(tenant), settings, copied_tokens=copied_tokens)
        admit_session(len(self._ledger), settings.max_sessions, self._ends.next_expiry_s - now_s)
