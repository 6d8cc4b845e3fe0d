"""SessionAuditor: checks the books of all pools, after each step by their balance, on demand page by page."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Literal

from cache.audit import AuditReport, Claim, PageAccounts, audit_pool
from cache.journal import Holder
from cache.pages import BooksError
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import PageAccount, SequenceKV
from cache.session_tiers import SessionTiers
from cache.slots import SlotTable

CheckLevel = Literal["off", "balance", "strict"]

logger = logging.getLogger(__name__)


class SessionAuditor:
    """Reads the books, and changes nothing in them."""

    def __init__(
        self, inner: PrefixCache, slots: SlotTable, account: PageAccount, tiers: SessionTiers
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._account = account
        self._tiers = tiers
        self._told_leaks = 0
        """Pages that were leaked when a check last named them."""
        self._last_leaks = 0

    def accounts(self) -> PageAccounts:
        """The accounts of the pool of full-attention layers, each from its own keeper's running counter."""
        return self._inner.accounts(self._account)

    def window_accounts(self) -> PageAccounts | None:
        return self._inner.window_accounts(self._account)

    def check(self, level: CheckLevel) -> None:
        """Raises BooksError, which names pages and who had them last, if a page is in two accounts; if strict, also if
        anything else is wrong. A balance names pages that have leaked in the log, again when they have doubled: nobody
        can read them, so they only cost memory."""
        if level == "off":
            return
        before, leaks = self._last_leaks, self._leaks()
        self._last_leaks = leaks
        # Leaked pages come back only where a planted fault ends. Else, if there seem to be fewer, others are in two
        # accounts.
        if level == "balance" and before <= leaks <= 2 * self._told_leaks:
            return
        report = self.audit()
        if not (report.clean or (level == "balance" and report.only_leaks)):
            raise BooksError(f"the KV books do not balance: {report}")
        if leaks:
            logger.error("the KV books do not balance: %s", report)
        self._told_leaks = leaks

    def _leaks(self) -> int:
        """Pages without an account; negative if a pool has more pages in its accounts than there are."""
        pools = self.accounts(), self.window_accounts()
        leaks = [pool.leaked for pool in pools if pool is not None]
        return min(leaks) if min(leaks) < 0 else sum(leaks)

    def audit(self) -> AuditReport:
        """Walks every page of every pool, every lock and the budgets of host and disk."""
        pools = {"full": self.accounts()}
        claims = [*self._inner.claims(), *self._session_claims()]
        findings, mismatches = audit_pool("full", pools["full"], claims, self._inner.allocator.journal)
        window, accounts = self._inner.window, self.window_accounts()
        if window is not None and accounts is not None:
            pools["window"] = accounts
            claims = [*self._inner.window_claims(), *self._session_window_claims()]
            found, wrong = audit_pool("window", accounts, claims, window.allocator.journal)
            findings += found
            mismatches += wrong
        mismatches += self._inner.lock_mismatches([kv for _, kv in self._parked()])
        mismatches += self._tiers.mismatches()
        host, disk = self._tiers.accounts()
        return AuditReport(pools, host, disk, tuple(findings), tuple(mismatches))

    def _parked(self) -> Iterator[tuple[Holder, SequenceKV]]:
        for slot in self._slots:
            if slot.kv is not None:
                yield Holder(slot.session_id), slot.kv
        for kv in self._tiers.orphans:
            yield kv.holder, kv

    def _session_claims(self) -> Iterator[Claim]:
        for holder, kv in self._parked():
            yield Claim("session", holder, kv.private_pages)

    def _session_window_claims(self) -> Iterator[Claim]:
        for holder, kv in self._parked():
            assert kv.window is not None
            yield Claim("session", holder, kv.window.live(kv.num_protected_pages))
