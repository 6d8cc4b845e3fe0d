"""What replicas hold, told with their heartbeats: what has changed, once, and everything only where it is asked for.

Reports are numbered. Each has what changed since the last one that the replica knows to be taken, the longest known
first, and no more than MOST_IN_REPORT of it. So one that is lost is made good by the next, and one that comes late or
twice is passed over. A controller that does not have the report which another is based on, because it has just started
or took the replica for gone, asks for everything; that comes in as many reports as it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from controllers.ownership import OwnershipLedger
from controllers.records import HeartbeatReply, SessionReport, SessionStatus

MOST_IN_REPORT = 1000
"""Sessions. So many take the event loops of both ends a few milliseconds."""


class ReportWriter:
    """The replica's half: what of its sessions the controller has not heard. One owner."""

    def __init__(self) -> None:
        self._number = 0
        self._taken = 0
        self._tells_all = True
        self._changed: dict[str, int] = {}
        """By session, in the order in which they are told, the first report that could have its latest change."""

    def note(self, session_ids: Iterable[str]) -> None:
        """These have changed, or are not held any more."""
        self._changed.update(dict.fromkeys(session_ids, self._number + 1))

    def next(
        self, status_of: Callable[[str], SessionStatus | None], held: Callable[[], Iterable[str]]
    ) -> SessionReport:
        """`status_of` is None for a session that is not held. `held` gives all that are; it is asked where everything
        has to be told."""
        if self._tells_all:
            self.note(held())
            self._tells_all = False
        self._number += 1
        statuses = {name: status_of(name) for name in islice(self._changed, MOST_IN_REPORT)}
        return SessionReport(
            self._number,
            self._taken,
            tuple(status for status in statuses.values() if status is not None),
            tuple(name for name, status in statuses.items() if status is None),
        )

    def answered(self, report: SessionReport, reply: HeartbeatReply) -> None:
        """Replies may come late and in any order."""
        if reply.wants_all:
            self._taken, self._tells_all = 0, True
            return
        self._taken = max(self._taken, report.number)
        for name in (*(status.session_id for status in report.changed), *report.dropped):
            if self._changed.get(name, report.number + 1) <= report.number:
                del self._changed[name]

    def tells_all_in(self, report: SessionReport) -> bool:
        """Whether nothing is left to be told when this report, the last one, is taken."""
        return len(self._changed) == len(report.changed) + len(report.dropped)

    @property
    def has_more(self) -> bool:
        """Whether there is something that is not known to be taken."""
        return self._tells_all or bool(self._changed)


class ReportReader:
    """The controller's half, which brings the ledger up to date. One owner."""

    def __init__(self, ledger: OwnershipLedger) -> None:
        self._ledger = ledger
        self._taken: dict[str, int] = {}
        """By replica its last report, of those whose reports are understood."""

    def take(self, replica_id: str, report: SessionReport) -> bool:
        """False if it is based on one that is not here: then everything has to be told. O(what it has)."""
        taken = self._taken.get(replica_id, 0)
        if report.since > taken:
            return False
        if report.number <= taken:
            return True
        self._taken[replica_id] = report.number
        self._ledger.report_dropped(replica_id, report.dropped)
        for status in report.changed:
            self._ledger.report(replica_id, status)
        return True

    def take_all(self, replica_id: str, sessions: Sequence[SessionStatus]) -> None:
        """Of a replica before wire version 3, which tells everything every time, without numbers."""
        self._taken.setdefault(replica_id, 0)
        for status in sessions:
            self._ledger.report(replica_id, status)
        self._ledger.report_no_others(replica_id, {status.session_id for status in sessions})

    def forget(self, replica_id: str) -> None:
        """What it has told is worth nothing any more."""
        self._taken.pop(replica_id, None)
        self._ledger.forget_stale(replica_id)

    def replicas(self) -> list[str]:
        """Of whose reports something is kept."""
        return list(self._taken)
