"""SequenceKV: the pages that hold one sequence's KV, and how far they are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cache.journal import NOBODY, Holder
from cache.pages import PageArray, PageCounts, no_pages
from cache.token_chain import TokenChain, Tokens
from cache.window_table import WindowTable

if TYPE_CHECKING:
    from cache.radix_tree import RadixNode

_INITIAL_CAPACITY = 16


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens need."""
    return -(-num_tokens // page_size)


class PageAccount:
    """Running count, for each pool, of the private pages of all sequences with one kind of holder."""

    __slots__ = ("full", "window")

    def __init__(self) -> None:
        self.full = 0
        self.window = 0

    @property
    def counts(self) -> PageCounts:
        return PageCounts(self.full, self.window)


class SequenceKV:
    """Page table of one sequence, owned by exactly one holder at a time: a live request or a session's slot.

    Invariant: protected_len <= committed_len <= allocated_len, draft_len <= committed_len; the table has
    ceil(allocated_len / page_size) pages. The first `protected_len` tokens (whole pages) lie in pages of the prefix
    tree, locked through `node`; the sequence may read but never write or free them. The draft model, if there is one,
    has its KV of the first `draft_len` tokens. Lengths are in tokens. Private pages are counted in `account`, the
    holder's. `window` is the table of sliding-window layers, if the model has any (cache/window.py keeps it).

    `pages` is a view of the page table, read-only by convention and valid until the sequence next changes; `contiguous`
    says that they are one ascending run. Both are made when the table changes, since every step asks for them. The
    first `sent_pages` entries have not changed since they were last sent to the runner: the holder sets it, and changes
    of the table lower it.

    `chain` has the tokens whose KV this is, and their hashes. While a slot holds the sequence, these are all committed
    tokens. While a request holds it, they are the tokens at the request's begin, or fewer; the request knows the others
    (`name`).
    """

    __slots__ = ("_breaks", "_buffer", "account", "allocated_len", "chain", "committed_len", "contiguous", "draft_len",
                 "holder", "namespace", "node", "num_pages", "page_size", "pages", "protected_len",
                 "sent_pages", "window")  # fmt: skip

    def __init__(
        self, chain: TokenChain, account: PageAccount, namespace: str = "", *, windowed: bool = False
    ) -> None:
        """`chain` must be empty."""
        self.page_size = chain.page_size
        self.chain = chain
        self.account = account
        self.namespace = namespace
        self.holder: Holder = NOBODY
        self._buffer = np.empty(_INITIAL_CAPACITY, dtype=np.int32)
        self._breaks = 0
        self.sent_pages = 0
        self._set_num_pages(0)
        self.allocated_len = 0
        self.committed_len = 0
        self.protected_len = 0
        self.draft_len = 0
        self.node: RadixNode | None = None
        self.window = WindowTable() if windowed else None

    @property
    def num_protected_pages(self) -> int:
        return self.protected_len // self.page_size

    @property
    def num_private_pages(self) -> int:
        return self.num_pages - self.protected_len // self.page_size

    @property
    def num_private_window_pages(self) -> int:
        return 0 if self.window is None else self.window.num_private(self.num_protected_pages)

    @property
    def private_pages(self) -> PageArray:
        return self._buffer[self.protected_len // self.page_size : self.num_pages]

    @property
    def last_page(self) -> int | None:
        return int(self._buffer[self.num_pages - 1]) if self.num_pages else None

    @property
    def shareable_len(self) -> int:
        """Tokens whose KV is complete, including the draft model's."""
        return min(self.committed_len, self.draft_len)

    def pages_missing(self, target_len: int) -> int:
        """Pages that each pool must add to hold `target_len` tokens."""
        return max(0, pages_for(target_len, self.page_size) - self.num_pages)

    def grow(self, pages: PageArray, allocated_len: int) -> None:
        """Takes ownership of `pages`, which must be exactly those missing for `allocated_len` tokens."""
        count = len(pages)
        end = self.num_pages + count
        if count:
            if end > len(self._buffer):
                grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int32)
                grown[: self.num_pages] = self.pages
                self._buffer = grown
            self._buffer[self.num_pages : end] = pages
            self._breaks += self._breaks_in(self.num_pages, end)
            self._set_num_pages(end)
            self.account.full += count
        self.allocated_len = max(self.allocated_len, allocated_len)
        assert self.num_pages == pages_for(self.allocated_len, self.page_size)

    def reach(self, target_len: int) -> bool:
        """Extends the allocation to `target_len` tokens on the pages that are there. False, and nothing changed, if
        they are too few."""
        if target_len > self.num_pages * self.page_size:
            return False
        if target_len > self.allocated_len:
            self.allocated_len = target_len
        return True

    def commit(self, committed_len: int, draft_len: int | None) -> None:
        """KV of accepted tokens is computed up to `committed_len`. `draft_len` None: there is no draft model, so none
        of its KV is missing."""
        assert committed_len <= self.allocated_len
        self.committed_len = committed_len
        self.draft_len = committed_len if draft_len is None else min(draft_len, committed_len)

    def name(self, tokens: Tokens) -> None:
        """The committed KV is that of `tokens`. Reads only the tokens that the chain does not have yet."""
        self.chain.extend(tokens[len(self.chain) : self.committed_len])

    def protect(self, length: int) -> None:
        """The first `length` tokens (whole pages) now belong to the tree."""
        assert length >= self.protected_len
        self.account.full -= (length - self.protected_len) // self.page_size
        self.protected_len = length

    def free_aligned(self, target_len: int) -> PageArray:
        """Cuts every length to `target_len` and gives up the pages wholly past it; a partly filled page stays.

        Must not cut into the protected prefix: the cache unprotects first.
        """
        assert target_len >= self.protected_len
        if self.allocated_len <= target_len:
            return no_pages()
        freed = self._cut(target_len)
        self.account.full -= len(freed)
        return freed

    def drop_protected(self, target_len: int) -> None:
        """Gives the tree's pages past `target_len` (whole pages) back to the tree. Private pages must be gone
        already."""
        assert self.num_private_pages == 0
        self.protected_len = target_len
        self._cut(target_len)

    def replace(self, start_page: int, pages: PageArray) -> None:
        """Points the table at other pages with the same KV (the tree's copy of a prefix)."""
        self._buffer[start_page : start_page + len(pages)] = pages
        self._breaks = self._breaks_in(1, self.num_pages)
        self.contiguous = self._breaks == 0
        self.sent_pages = min(self.sent_pages, start_page)

    def move_to(self, account: PageAccount) -> None:
        """Changes the holder: private pages are counted in `account` from now on."""
        full, window = self.num_private_pages, self.num_private_window_pages
        self.account.full -= full
        self.account.window -= window
        account.full += full
        account.window += window
        self.account = account

    def _cut(self, target_len: int) -> PageArray:
        keep = pages_for(target_len, self.page_size)
        freed = self._buffer[keep : self.num_pages].copy()
        if self._breaks:
            self._breaks -= self._breaks_in(keep, self.num_pages)
        self._set_num_pages(keep)
        self.sent_pages = min(self.sent_pages, keep)
        self.allocated_len = min(self.allocated_len, target_len)
        self.committed_len = min(self.committed_len, target_len)
        self.draft_len = min(self.draft_len, target_len)
        self.chain.cut(self.committed_len)
        return freed

    def _set_num_pages(self, count: int) -> None:
        """Call it after the table and its breaks have changed."""
        self.num_pages = count
        self.pages = self._buffer[:count]
        self.contiguous = self._breaks == 0

    def _breaks_in(self, start: int, end: int) -> int:
        """Pages from `start` to `end` that do not follow the page before them."""
        start = max(start, 1)
        if end <= start:
            return 0
        if end == start + 1:
            return int(self._buffer[start] != self._buffer[start - 1] + 1)
        return int(np.count_nonzero(np.diff(self._buffer[start - 1 : end]) != 1))

    def __repr__(self) -> str:
        return (
            f"SequenceKV(pages={self.num_pages}, allocated={self.allocated_len}, "
            f"committed={self.committed_len}, protected={self.protected_len})"
        )
