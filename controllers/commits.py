"""Commits turns to the log and the ledger: fences each turn, writes a group to the log, and notes the outcomes."""

from __future__ import annotations

from collections.abc import Sequence

from controllers.cluster_stats import ClusterStats
from controllers.commit_groups import CommitGroups, Outcome
from controllers.errors import ControllerError, StoreError
from controllers.ownership import OwnershipLedger
from controllers.records import TurnRecord
from controllers.session_claims import SessionClaims
from controllers.session_log.store import SessionStore


class Commits:
    """Commits turns. Used by the owner of `ledger` and `store`."""

    def __init__(
        self, ledger: OwnershipLedger, claims: SessionClaims, store: SessionStore, stats: ClusterStats
    ) -> None:
        self._ledger = ledger
        self._claims = claims
        self._store = store
        self._stats = stats

    def in_groups(self) -> CommitGroups:
        """CommitGroups that commit turns which come at the same time together, in one step of the event loop."""

        async def write(records: Sequence[TurnRecord]) -> Sequence[Outcome]:
            self._stats.group_written(len(records))
            return self.commit(records)

        return CommitGroups(write)

    def commit(self, records: Sequence[TurnRecord]) -> list[Outcome]:
        """Appends turns to their sessions' logs, one after the other, and returns the outcome of each. A turn that is
        refused changes nothing. Repeating the last commit of a session is fine.

        Outcomes are None, SessionNotFound, StaleEpoch, IdempotencyConflict, and StoreError if nobody knows whether the
        log holds the turn.
        """
        outcomes = list(map(self._fenced, records))
        passed = [at for at, refusal in enumerate(outcomes) if refusal is None]
        if passed:
            written = self._written([records[at] for at in passed])
            for at, outcome in zip(passed, written, strict=True):
                outcomes[at] = self._noted(records[at], outcome)
        for refusal in filter(None, outcomes):
            failed = isinstance(refusal, StoreError)
            self._stats.count("commits_failed" if failed else "turns_refused")
        return outcomes

    def _fenced(self, record: TurnRecord) -> Outcome:
        try:
            self._claims.fence(record.session_id, record.epoch)
        except ControllerError as refusal:
            return refusal
        return None

    def _written(self, records: Sequence[TurnRecord]) -> Sequence[Outcome]:
        try:
            with self._stats.timed("commit"):
                return self._store.append_turns(records)
        except StoreError as error:
            return [error] * len(records)

    def _noted(self, record: TurnRecord, outcome: Outcome) -> Outcome:
        if outcome is not None:
            try:
                self._claims.refused(record.session_id, outcome)
            except StoreError as error:
                return error
            return outcome
        if (
            record.session_id in self._ledger
        ):  # else another turn of the group showed that it is another cluster's now
            if self._ledger.get(record.session_id).turns == record.turn_index:
                self._stats.count("turns_committed")
            self._ledger.committed(record.session_id, tokens=record.end_len, turns=record.turn_index + 1)
        return None
