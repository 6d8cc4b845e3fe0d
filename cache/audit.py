"""Do the KV books balance? Pool balances from counts, and a walk that gives every page its one account."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cache.journal import PageJournal, PageTrace
from cache.pages import BooksError, PageArray

PoolName = Literal["full", "window"]


@dataclass(frozen=True, slots=True)
class PageAccounts:
    """The books of one pool, in pages. Each count comes from its own keeper; they balance when `leaked` is zero.

    free: the allocator's; cached: in the prefix tree, evictable; protected: in the tree, locked; session: private
    pages of idle sessions; in_flight: private pages of live requests.
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
class HostAccounts:
    """Idle sessions' KV in host memory, in bytes of the budget."""

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
    host: HostAccounts
    findings: tuple[Finding, ...]
    mismatches: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not self.findings and not self.mismatches
