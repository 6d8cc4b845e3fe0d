"""Do the KV books balance? Pool balances from counts, and a walk that gives every page its one account."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cache.pages import BooksError, PageArray


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


def check_balance(accounts: PageAccounts) -> None:
    """Raises BooksError if pages are unaccounted for or counted twice."""
    if accounts.leaked:
        raise BooksError(f"KV books do not balance, {accounts.leaked} pages leaked: {accounts}")


def check_pages(num_pages: int, claims: Iterable[tuple[str, PageArray]]) -> None:
    """Walks every claim (account, pages); raises BooksError naming pages with no account or with two."""
    account_of: dict[int, str] = {}
    for account, pages in claims:
        for page in pages.tolist():
            if page in account_of:
                raise BooksError(f"page {page} belongs to {account_of[page]} and to {account}")
            account_of[page] = account
    missing = [page for page in range(num_pages) if page not in account_of]
    if missing:
        raise BooksError(f"pages {missing[:20]} have no account ({len(missing)} in all)")
