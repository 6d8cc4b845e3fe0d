"""Reports of the sessions that replicas hold, sent with heartbeats: changes, or everything if the controller asks.

Reports are numbered. Each has the changes since the last report that the replica knows to have arrived, oldest first,
but at most MOST_IN_REPORT of them. So the next report makes up for a lost one, and the controller ignores a report that
comes late or twice. A report may be based on one that the controller does not have, because it has just started or took
the replica for gone. It then asks for everything, which comes in as many reports as needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from controllers.ownership import OwnershipLedger
from controllers.records import HeartbeatReply, SessionReport, SessionStatus

MOST_IN_REPORT = 1000
"""The most sessions in one report. They take the event loops of both ends a few milliseconds."""


class ReportWriter:
    """The replica's half: the changes of its sessions that the controller has not received. One owner."""

    def __init__(self) -> None:
        self._number = 0
        self._taken = 0
        self._tells_all = True
        self._changed: dict[str, int] = {}
        """By session, the number of the first report that could have its latest change. In the order of reporting."""

    def note(self, session_ids: Iterable[str]) -> None:
        """Notes sessions that have changed or are no longer held."""
        self._changed.update(dict.fromkeys(session_ids, self._number + 1))

    def next(
        self, status_of: Callable[[str], SessionStatus | None], held: Callable[[], Iterable[str]]
    ) -> SessionReport:
        """Makes the next report. `status_of` returns None for a session that is not held. `held` returns all held
        sessions; it is called if everything must be reported."""
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
        """Takes the reply to a report. Replies may come late and in any order."""
        if reply.wants_all:
            self._taken, self._tells_all = 0, True
            return
        self._taken = max(self._taken, report.number)
        for name in (*(status.session_id for status in report.changed), *report.dropped):
            if self._changed.get(name, report.number + 1) <= report.number:
                del self._changed[name]

    def tells_all_in(self, report: SessionReport) -> bool:
        """Whether the controller knows everything once it has this report, which must be the last one made."""
        return len(self._changed) == len(report.changed) + len(report.dropped)

    @property
    def has_more(self) -> bool:
        """Whether there are changes that the controller is not known to have received."""
        return self._tells_all or bool(self._changed)


class ReportReader:
    """The controller's half: it updates the ledger. One owner."""

    def __init__(self, ledger: OwnershipLedger) -> None:
        self._ledger = ledger
        self._taken: dict[str, int] = {}
        """By replica, the number of its last report. Has only replicas whose reports were understood."""

    def take(self, replica_id: str, report: SessionReport) -> bool:
        """Takes a report. False if it is based on a report that is not here: the replica must then report everything.
        O(size of the report)."""
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

    def forget(self, replica_id: str) -> None:
        """Forgets the replica's reports: they no longer count."""
        self._taken.pop(replica_id, None)
        self._ledger.forget_stale(replica_id)

    def replicas(self) -> list[str]:
        """The replicas with a report that counts."""
        return list(self._taken)
