"""Checks that the KV books balance: each pool by its counts, and a walk that must find exactly one account for every
page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cache.journal import Holder, PageJournal, PageTrace
from cache.pages import PageArray

PoolName = Literal["full", "window"]


@dataclass(frozen=True, slots=True)
class PageAccounts:
    """The accounts of one pool, in pages. Each count comes from its own keeper; they balance when `leaked` is zero.

    free: the allocator's; cached: in the prefix tree, evictable; protected: in the tree, locked; session: private pages
    of idle sessions; in_flight: private pages of live requests.
    """

    total: int
    free: int
    cached: int
    protected: int
    session: int
    in_flight: int

    @property
    def leaked(self) -> int:
        return self.total - self.free - self.cached - self.protected - self.session - self.in_flight


@dataclass(frozen=True, slots=True)
class Claim:
    """Pages that one holder claims as its own. `account` is a field of PageAccounts."""

    account: str
    holder: Holder | None
    pages: PageArray

    def __str__(self) -> str:
        return self.account if self.holder is None else f"{self.account} ({self.holder})"


@dataclass(frozen=True, slots=True)
class TierAccounts:
    """Bytes that idle sessions' KV takes in host memory, or on disk, and their budget."""

    budget_bytes: int
    used_bytes: int
    sessions: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One page of `pool` with no account (`leaked`) or with more than one, and what last happened to it."""

    kind: Literal["leaked", "doubly accounted"]
    pool: PoolName
    page: int
    accounts: tuple[str, ...]
    last: PageTrace | None

    def __str__(self) -> str:
        where = f" in {' and in '.join(self.accounts)}" if self.accounts else ""
        return f"page {self.page} of pool {self.pool} is {self.kind}{where}; {self.last or 'never used'}"


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What a deep audit saw. `mismatches` are counters that disagree with the walk."""

    pools: dict[str, PageAccounts]
    host: TierAccounts
    disk: TierAccounts
    findings: tuple[Finding, ...]
    mismatches: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.findings and not self.mismatches

    @property
    def only_leaks(self) -> bool:
        """Whether nothing is wrong but that pages have no account."""
        return not self.mismatches and all(finding.kind == "leaked" for finding in self.findings)

    def __str__(self) -> str:
        return "; ".join([*map(str, self.findings), *self.mismatches]) or "the books balance"


def audit_pool(
    pool: PoolName, accounts: PageAccounts, claims: Iterable[Claim], journal: PageJournal
) -> tuple[list[Finding], list[str]]:
    """Walks every claim. Returns pages with no account or with several, and counters that the walk does not confirm."""
    claimed = list(claims)
    counted: Counter[str] = Counter()
    for claim in claimed:
        counted[claim.account] += len(claim.pages)
    mismatches = [
        f"pool {pool}: {account} is {getattr(accounts, account)} by its counter, {counted[account]} by the walk"
        for account in ("free", "cached", "protected", "session", "in_flight")
        if getattr(accounts, account) != counted[account]
    ]
    times = np.zeros(accounts.total, dtype=np.int64)
    if claimed:
        times += np.bincount(np.concatenate([claim.pages for claim in claimed]), minlength=accounts.total)
    findings = []
    for page in np.flatnonzero(times != 1).tolist():
        holders = tuple(str(claim) for claim in claimed for _ in range(int((claim.pages == page).sum())))
        kind: Literal["leaked", "doubly accounted"] = "doubly accounted" if holders else "leaked"
        findings.append(Finding(kind, pool, page, holders, journal.last(page)))
    return findings, mismatches
