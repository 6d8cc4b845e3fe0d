"""SessionEnds: ends sessions, on an order or when nobody uses them any more, in the log and then in the ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from controllers.cluster_stats import ClusterStats
from controllers.cluster_watch import ClusterWatch
from controllers.errors import SessionTakenOver, StoreError
from controllers.ownership import OwnershipLedger
from controllers.records import LedgerEntry
from controllers.replicas import ReplicaDirectory
from controllers.session_claims import SessionClaims
from controllers.session_keys import named
from controllers.session_reports import ReportReader

logger = logging.getLogger(__name__)

MOST_ENDED_AT_ONCE = 512
"""Sessions that one call ends. The controller does nothing else meanwhile: 40 ms in a file, and about ten times as long
in Redis."""
MOST_FAILURES_IN_A_ROW = 3
"""A call ends when the log fails for so many sessions, one after the other: it may be away, and then each costs a
timeout."""
_EXPIRE_INTERVAL_S = 1.0
_FORGET_REPLICA_AFTER_S = 3600.0


class SessionEnds:
    """Used by the owner of all these parts. `clock` returns Unix time in seconds, `attended` attended seconds.

    `next_expiry_s`: no session expires before this time.

    A session that the log cannot delete, for example because its key is gone, stays. It is tried again after all
    others, so it keeps none of them from ending.
    """

    def __init__(
        self,
        ledger: OwnershipLedger,
        claims: SessionClaims,
        replicas: ReplicaDirectory,
        reports: ReportReader,
        stats: ClusterStats,
        watch: ClusterWatch,
        clock: Callable[[], float],
        attended: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._claims = claims
        self._replicas = replicas
        self._reports = reports
        self._stats = stats
        self._watch = watch
        self._clock = clock
        self._attended = attended
        self._started_s = attended()
        self._failed: dict[str, None] = {}  # those that could not be ended; the latest failure is last
        self.next_expiry_s = 0.0

    def end(self, session_id: str, why: str = "") -> bool:
        """Deletes the session. False if it was not in the log any more."""
        with self._claims.changing(session_id, "close") as store:
            closed = store.close(session_id)
        self._ledger.expire(session_id)
        self._watch.closed(session_id, why)
        return closed

    def expire_idle(self, replica_timeout_s: float) -> list[str]:
        """Ends sessions that are past their idle timeout or to be closed, if no owner will end them. Returns their ids.
        One call ends at most MOST_ENDED_AT_ONCE. What the log does not delete is counted and stays open.

        An owner that reports a session ends it itself. After a restart of the controller, nothing expires before owners
        have had `replica_timeout_s` to report. Sessions of clusters that are gone also end here.
        """
        now_s = self._clock()
        self._forget_gone()
        idle = self._claims.refresh(self._ledger.expires_at_s, now_s)
        if self._attended() - self._started_s <= replica_timeout_s:
            return self._end(idle)
        past_timeout = self._ledger.past_timeout(now_s)
        expired = self._end(
            chain(idle, (each.session_id for each in past_timeout if self._unused(each, now_s)))
        )
        soonest_s = self._ledger.soonest_expiry_s()
        self.next_expiry_s = max(now_s if soonest_s is None else soonest_s, now_s + _EXPIRE_INTERVAL_S)
        return expired

    def _unused(self, entry: LedgerEntry, now_s: float) -> bool:
        """Whether no owner holds a session that is past its timeout. An owner ends the sessions that it holds."""
        owner_gone = self._replicas.gone(entry.replica_id)
        if entry.reported_s is not None and not owner_gone:
            return False
        if not entry.in_turn:
            return True
        # The owner went away during a turn that it had reported. The timeout begins when the owner was last heard.
        used_s = now_s - self._replicas.silence_s(entry.replica_id)
        if used_s > entry.last_used_s:
            entry = self._ledger.touch(entry.session_id, used_s)
        return self._ledger.expires_at_s(entry) < now_s

    def _forget_gone(self) -> None:
        for replica_id in self._reports.replicas():
            if self._replicas.gone(replica_id):
                self._reports.forget(replica_id)
        self._replicas.forget_silent(_FORGET_REPLICA_AFTER_S)

    def _end(self, idle: Iterable[str]) -> list[str]:
        """Ends those of the sessions that are still this cluster's. Returns their ids."""
        ended: list[str] = []
        failures = 0
        for session_id in islice(self._failed_last(idle), MOST_ENDED_AT_ONCE):
            self._failed.pop(session_id, None)
            try:
                if self.end(session_id, "idle timeout"):
                    ended.append(session_id)
                failures = 0
            except SessionTakenOver:
                failures = 0
            except StoreError as error:
                logger.warning("%s cannot be ended: %s", named(session_id), error)
                self._failed[session_id] = None
                failures += 1
                if failures == MOST_FAILURES_IN_A_ROW:
                    break
        self._stats.count("sessions_expired", len(ended))
        return ended

    def _failed_last(self, idle: Iterable[str]) -> Iterator[str]:
        """The sessions, those that could not be ended before after all others, the longest untried first. At its end
        it forgets failures of sessions that are not idle any more."""
        former, still = list(self._failed), set()
        for session_id in idle:
            if session_id in self._failed:
                still.add(session_id)
            else:
                yield session_id
        for session_id in former:
            if session_id in still:
                yield session_id
            else:
                del self._failed[session_id]
