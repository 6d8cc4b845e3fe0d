"""ClusterController's logic without Ray. It keeps the ledger, the replicas and the session log in step.

Invariant: the log is written before the ledger, so everything in the ledger survives a crash.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from controllers.attended_clock import AttendedClock
from controllers.cluster_measures import measures
from controllers.cluster_stats import ClusterStats
from controllers.cluster_watch import ClusterWatch
from controllers.commits import Commits
from controllers.errors import (
    NoAnswer,
    SessionClosing,
    SessionExists,
    SessionNotFound,
    SessionTakenOver,
    StaleEpoch,
    StoreError,
)
from controllers.histogram import Measure
from controllers.ownership import OwnershipLedger
from controllers.placement import choose_replica
from controllers.rebalancing import Rebalancing, kv_tokens_at_owner
from controllers.records import (
    Assignment,
    ForkedHistory,
    ForkOrder,
    HeartbeatReply,
    LedgerEntry,
    ReplicaStatus,
    SessionRecord,
    SessionReport,
)
from controllers.replicas import ReplicaDirectory, ReplicaState
from controllers.session_claims import SessionClaims
from controllers.session_ends import SessionEnds
from controllers.session_keys import named, session_key
from controllers.session_log.store import SessionStore
from controllers.session_notes import SessionNotes
from controllers.session_openings import SessionOpenings
from controllers.session_reports import ReportReader
from controllers.settings import ClusterSettings

_OPEN_KEY_BYTES = 16
_TOUCH_LOG_AFTER_S = 30.0
_LATE_AFTER = 1 / 3
"""A heartbeat is late after this share of the replica timeout. Settings make heartbeats more frequent than that."""


class Cluster:
    """Which replica owns which session. `clock` returns Unix time in seconds, for what the log keeps. `timer` returns
    monotonic seconds, for everything else.

    The owner calls `tick` every attended_clock.TICK_S. The constructor rebuilds the ledger from the store. Every method
    may raise StoreError.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        store: SessionStore,
        clock: Callable[[], float],
        timer: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._stats = ClusterStats(timer)
        self._attended = attended = AttendedClock(timer)
        self._ledger = OwnershipLedger(
            clock, attended, store.load_all_entries(), default_timeout_s=settings.session_timeout_s
        )
        self._reports = ReportReader(self._ledger)
        self._replicas = ReplicaDirectory(
            attended, settings.replica_timeout_s, settings.heartbeat_interval_s, self._ledger.count_of
        )
        self.watch = ClusterWatch(self._ledger, self._replicas, clock)
        self._claims = SessionClaims(self._ledger, store, self._stats, self.watch)
        self.commits = Commits(self._ledger, self._claims, store, self._stats)
        self.notes = SessionNotes(self._ledger, self._claims)
        self._rebalancing = self._rebalancing_by(settings)
        self._ends = SessionEnds(
            self._ledger,
            self._claims,
            self._replicas,
            self._reports,
            self._stats,
            self.watch,
            clock,
            attended,
        )
        self._openings = SessionOpenings(
            settings,
            self._ledger,
            self._claims,
            self._replicas,
            self._ends,
            store,
            self._stats,
            self.watch,
            clock,
        )

    def tick(self) -> None:
        """Tells the clock that calls can run, so that no replica counts as silent while none could. Also counts
        lost replicas, and removes deleted data from the log's files."""
        self._attended.tick()
        self._stats.count("replicas_lost", self._replicas.newly_lost())
        self.watch.look()
        with suppress(StoreError):  # the next tick tries again
            self._store.purge()

    def configure(self, settings: ClusterSettings) -> None:
        """Changes the settings. Sessions, replicas and what is known of them stay."""
        if settings.rebalancing != self._settings.rebalancing:
            self._rebalancing = self._rebalancing_by(settings)
        self._replicas.configure(settings.replica_timeout_s, settings.heartbeat_interval_s)
        self._ledger.configure(settings.session_timeout_s)
        self._settings = self._openings.settings = settings

    def register_replica(self, status: ReplicaStatus) -> None:
        """Registers a replica, also one that counted as gone."""
        self._replicas.register(status)
        self.watch.look()

    def heartbeat(self, status: ReplicaStatus, report: SessionReport) -> HeartbeatReply:
        """Notes a replica's load and its report of its sessions. The reply names the sessions that it does not own, and
        says whether it is crowded."""
        replica_id = status.replica_id
        known = self._replicas.heartbeat(status)
        if not known:
            self._reports.forget(replica_id)
        understood = self._reports.take(replica_id, report)
        stale = self._ledger.tell_stale(replica_id)
        draining = self._replicas.state(replica_id) is ReplicaState.DRAINING
        crowded = False
        if known and not draining and self._rebalancing is not None:
            turns = status.running + status.waiting
            crowded = self._rebalancing.report(replica_id, turns, self._takers(replica_id))
        return HeartbeatReply(
            known,
            tuple(stale),
            crowded,
            draining,
            tuple(stale.values()),
            wants_all=not understood,
        )

    def report_unreachable(self, replica_id: str, died: bool) -> bool:
        """Notes that a front end could not reach a replica. `died`: its process has certainly ended. True if the
        replica now counts as gone: its sessions move when they are next used."""
        gone = self._replicas.unreachable(replica_id, died=died) is ReplicaState.GONE
        if gone:
            self._reports.forget(replica_id)
        self.watch.look("its process has ended" if died else "it cannot be reached")
        return gone

    def drain_replica(self, replica_id: str) -> None:
        """Makes the replica drain: it gets no more sessions, and is told to hand over those that it has. Raises
        NoReplica, and changes nothing, if no other replica could take them."""
        self._replicas.order_drain(replica_id)
        self.watch.look()

    def deregister_replica(self, replica_id: str) -> int:
        """Notes a replica's farewell. Returns how many sessions it still owns: they move when they are next used."""
        drained_s = self._replicas.deregister(replica_id)
        if drained_s is not None:
            self._stats.replica_left(drained_s)
        self.watch.look("it has said farewell")
        self._reports.forget(replica_id)
        return self._ledger.count_of(replica_id)

    def open_session(
        self,
        session_id: str,
        tenant: str,
        timeout_s: float | None,
        capacity_tokens: int | None,
        open_key: str | None = None,
        preferred: str | None = None,
    ) -> Assignment:
        """Opens a session and places it, at the `preferred` replica if its load allows.

        Repeating an open with the same `open_key` returns the same assignment.
        Raises SessionExists, NoReplica, InvalidTimeout and Overloaded.
        """
        key = session_key(tenant, session_id)
        if self._claims.still_held(key):
            entry = self._ledger.get(key)
            if open_key is None or entry.open_key != open_key:
                raise SessionExists(f"{named(key)} is open already", "session_id")
            return self._assignment(entry, fresh=False)
        entry = self._openings.open(
            key, tenant, timeout_s, capacity_tokens, open_key, lambda: self._place(preferred)
        )
        return self._assignment(entry, fresh=True)

    def fork_session(self, parent_id: str, epoch: int, replica_id: str, order: ForkOrder) -> SessionRecord:
        """Starts a session from the first tokens of its parent, at the same replica. The parent's owner calls this
        between two turns.

        Returns the child's record without its history. Repeating a fork with the same `fork_key` returns the same
        child, and moves it to the parent's replica. Raises SessionNotFound, StaleEpoch, SessionExists, InvalidFork,
        InvalidTimeout, Overloaded.
        """
        parent = self._claims.fence(parent_id, epoch, replica_id)
        order = replace(order, child_id=session_key(parent.tenant, order.child_id))
        length = parent.tokens if order.length is None else order.length
        if not self._claims.still_held(order.child_id):
            self._openings.fork(parent, order, length)
        return self._at_parent(replica_id, order, length)

    def copy_for_fork(
        self, parent_id: str, epoch: int, replica_id: str, length: int | None = None
    ) -> ForkedHistory:
        """What a fork of the session begins with. The parent's owner calls this between two turns, if the child is to
        be another shard's, and has that shard open the child (`open_fork`). Raises SessionNotFound, StaleEpoch and
        InvalidFork."""
        parent = self._claims.fence(parent_id, epoch, replica_id)
        return self._openings.copy_for_fork(parent, parent.tokens if length is None else length)

    def open_fork(self, copy: ForkedHistory, order: ForkOrder) -> SessionRecord:
        """Starts a session from a copy of another shard's. Otherwise the same as `fork_session`."""
        order = replace(order, child_id=session_key(copy.parent.tenant, order.child_id))
        if not self._claims.still_held(order.child_id):
            self._openings.fork_of_copy(copy, order)
        return self._at_parent(copy.parent.replica_id, order, copy.parent.num_tokens)

    def resolve(
        self,
        session_id: str,
        create: bool,
        tenant: str,
        preferred: str | None = None,
        timeout_s: float | None = None,
    ) -> Assignment:
        """The session's owner. A session whose owner is gone, or that another cluster owns, first moves, at the next
        epoch. A draining owner hands its sessions over itself, since it alone knows of turns in flight.

        Raises SessionNotFound if the tenant has no such session, and NoReplica. With `create` such a session is opened,
        with the idle timeout `timeout_s` (None: the default); that raises what `open_session` raises.
        """
        key = session_key(tenant, session_id)
        try:
            return self._resolve(key, create, tenant, preferred, timeout_s)
        except (SessionTakenOver, StaleEpoch):
            # Another cluster took it, or the answer to a takeover was lost. It left the ledger: the retry claims it.
            return self._resolve(key, create, tenant, preferred, timeout_s)

    def load_session(self, session_id: str, epoch: int, replica_id: str) -> SessionRecord:
        """The session with its committed history. The owner calls this. Raises SessionNotFound, StaleEpoch."""
        self._claims.fence(session_id, epoch, replica_id)
        self._ledger.touch(session_id)
        return self._claims.load(session_id, epoch)

    def offer_session(self, session_id: str, epoch: int, replica_id: str) -> bool:
        """Moves the session if its owner drains, or to a less busy replica. Returns whether it moved. The owner calls
        this while no turn of the session is in flight. A session that is to be closed stays.

        Raises SessionNotFound and StaleEpoch. A repeated call raises StaleEpoch if the first one moved the session.
        """
        entry = self._claims.fence(session_id, epoch, replica_id)
        if entry.closes_after is not None:
            return False
        if self._replicas.state(replica_id) is ReplicaState.DRAINING:
            return self._drain_session(entry)
        if self._rebalancing is None:
            return False
        kv_tokens = kv_tokens_at_owner(entry)
        taker = self._rebalancing.choose(replica_id, kv_tokens, self._takers(replica_id))
        if taker is None:
            return False
        self._move_to(entry, taker)
        self.watch.moved(entry, taker, "to a less busy replica")
        self._rebalancing.moved(replica_id, taker, kv_tokens)
        self._stats.count("rebalanced")
        return True

    def move_session(self, session_id: str, epoch: int, replica_id: str, to: str | None) -> Assignment:
        """Moves a session to the replica `to` (None: to the best of the others), unless `to` owns it already. The owner
        calls this while the session has no turn. Raises SessionNotFound, StaleEpoch, SessionClosing, InvalidMove and
        NoReplica."""
        entry = self._claims.fence(session_id, epoch, replica_id)
        if entry.closes_after is not None:
            raise SessionClosing(f"{named(session_id)} is being closed")
        if to != replica_id:
            self._move_to(entry, taker := self._replicas.taker(to, replica_id))
            self.watch.moved(entry, taker, "as an operator asked")
            self._stats.count("moved_by_operators")
        return self._assignment(self._ledger.get(session_id), fresh=to != replica_id)

    def close_session(
        self,
        session_id: str,
        tenant: str | None = None,
        epoch: int | None = None,
        open_key: str | None = None,
    ) -> bool:
        """Ends a session and deletes its log. False if it was unknown. Without `tenant`, `session_id` is its key.

        An owner gives its `epoch`, so that a former owner cannot close a session that has moved: that raises
        StaleEpoch. Other callers give the `open_key`, since the call may be repeated late, when another session has the
        same name.
        """
        key = session_id if tenant is None else session_key(tenant, session_id)
        try:
            if epoch is not None:
                self._claims.fence(key, epoch)
            elif self._claims.claimable(key):
                self._claims.claim(key, replica_id="")
            if open_key not in (None, self._ledger.get(key).open_key):
                return False
            closed = self._ends.end(key)
        except SessionNotFound:
            return False
        except SessionTakenOver:
            if epoch is not None:
                raise
            return self.close_session(session_id, tenant, open_key=open_key)
        self._stats.count("sessions_closed", closed)
        return closed

    def close_after(self, session_id: str, epoch: int, turn_key: str) -> None:
        """Records that the session is to be closed when the turn with this idempotency key has ended, whoever owns it
        then. The owner calls this while that turn is in flight. Raises SessionNotFound and StaleEpoch."""
        self._claims.fence(session_id, epoch)
        with self._claims.changing(session_id, "close_after") as store:
            store.close_after(session_id, turn_key)
        self._ledger.close_after(session_id, turn_key)

    def expire_idle(self) -> list[str]:
        """Ends idle sessions that no owner will end, see SessionEnds.expire_idle."""
        return self._ends.expire_idle(self._settings.replica_timeout_s)

    def sessions(
        self, tenant: str | None = None, after: str | None = None, limit: int | None = None
    ) -> list[LedgerEntry]:
        """A page of the ledger's sessions, see OwnershipLedger.page and ClusterWatch.told."""
        return list(map(self.watch.told, self._ledger.page(tenant, after, limit)))

    def session(self, session_id: str) -> LedgerEntry:
        """One entry of the ledger, see ClusterWatch.told. Raises SessionNotFound."""
        return self.watch.told(self._ledger.get(session_id))

    def count(self) -> int:
        """Sessions in the ledger."""
        return len(self._ledger)

    def replicas(self, all_heard: bool = False) -> list[ReplicaStatus]:
        """Replicas that are not gone, with the sessions that they own. With `all_heard`, raises NoAnswer right after a
        start, when some may not have been heard yet."""
        if all_heard and not self._replicas.all_heard:
            raise NoAnswer(
                "the cluster controller has just started, and may not have heard of all replicas yet"
            )
        return self._replicas.present()

    def measures(self, commits_queued: int = 0) -> list[Measure]:
        """Figures for metrics. `commits_queued`: how many turns wait for their group of commits."""
        queued = Measure("controller_commits_queued", float(commits_queued))
        return [*measures(self._ledger, self._replicas, self._stats), queued]

    def _resolve(
        self, session_id: str, create: bool, tenant: str, preferred: str | None, timeout_s: float | None
    ) -> Assignment:
        claimed = self._claims.claimable(session_id)
        if claimed:
            entry = self._claims.claim(session_id, self._place())
            self._replicas.assign_tokens(entry.replica_id, entry.tokens + self._settings.placement_tokens)
        elif session_id not in self._ledger and create:
            open_key = secrets.token_urlsafe(_OPEN_KEY_BYTES)
            return self.open_session(session_id, tenant, timeout_s, None, open_key, preferred)
        entry = self._ledger.get(session_id)
        if moves := self._must_move(entry):
            self._move_to(entry, taker := self._place())
            self.watch.taken_over(entry, taker)
            self._stats.count("unheard_owners", self._replicas.unheard(entry.replica_id))
        if self._clock() - entry.last_used_s > _TOUCH_LOG_AFTER_S:
            # This only restarts the idle clock: while the log is away, turns still reach a known owner.
            with suppress(StoreError), self._claims.changing(session_id, "touch") as store:
                store.touch(session_id, self._clock())
        return self._assignment(self._ledger.touch(session_id), fresh=claimed or moves)

    def _assignment(self, entry: LedgerEntry, *, fresh: bool) -> Assignment:
        age_s = self._clock() - entry.created_s
        return Assignment(entry.session_id, entry.replica_id, entry.epoch, fresh, entry.open_key, age_s)

    def _must_move(self, entry: LedgerEntry) -> bool:
        owner = entry.replica_id
        if self._replicas.ended(owner):
            return True
        # A silent owner may only be slow. If no other replica is there, it is better to ask it than nobody.
        return self._replicas.gone(owner) and bool(self._replicas.candidates())

    def _drain_session(self, entry: LedgerEntry) -> bool:
        """Moves the session to a live replica. While there is none, the draining owner serves it."""
        takers = self._replicas.candidates((ReplicaState.LIVE,))
        if not takers:
            return False
        taker = choose_replica(takers)
        self._move_to(entry, taker)
        self.watch.moved(entry, taker, "its replica drains")
        self._stats.count("drained")
        return True

    def _at_parent(self, replica_id: str, order: ForkOrder, length: int) -> SessionRecord:
        child = self._ledger.get(order.child_id)
        if (child.open_key, child.tokens, child.turns) != (order.fork_key, length, 0):
            raise SessionExists(f"{named(order.child_id)} is open already", "new_session_id")
        if child.replica_id != replica_id:
            self._move_to(child, replica_id)
            self.watch.moved(child, replica_id, "to the session that it is a fork of")
        return self._ledger.get(order.child_id).record()

    def _move_to(self, entry: LedgerEntry, replica_id: str) -> None:
        with self._claims.changing(entry.session_id, "assign") as store:
            store.assign(entry.session_id, replica_id, entry.epoch + 1)
        self._replicas.assign_tokens(replica_id, entry.tokens + self._settings.placement_tokens)
        self._stats.count("transfers")
        self._ledger.transfer(entry.session_id, replica_id)

    def _place(self, preferred: str | None = None) -> str:
        return choose_replica(self._replicas.candidates(), preferred)

    def _takers(self, owner_id: str) -> list[str]:
        """Replicas to which sessions of this one may move to even out load."""
        settled = self._replicas.settled(self._settings.replica_timeout_s * _LATE_AFTER)
        return [status.replica_id for status in settled if status.replica_id != owner_id]

    def _rebalancing_by(self, settings: ClusterSettings) -> Rebalancing | None:
        rebalancing = settings.rebalancing
        return None if rebalancing is None else Rebalancing(rebalancing, self._attended)
