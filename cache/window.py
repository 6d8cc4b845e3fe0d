"""WindowPool: pages of the sliding-window layers, freed as the window passes.

In a layer with a window of W tokens, the query at position p sees keys from p - W + 1 on, so older pages are not
needed. A window page belongs to one sequence or to the prefix tree. The tree's pages are protected while sequences hold
them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cache.pages import BooksError, PageAllocator, PageArray
from cache.radix_tree import RadixTree
from cache.sequence_kv import SequenceKV, pages_for
from cache.window_table import GONE


class WindowPool:
    """Owns the pool's allocator, and counts who holds the tree's pages. `window_len` in tokens, counts in pages.

    A little more than the window is kept: see `_oldest_kept`.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, window_len: int) -> None:
        self.allocator = allocator
        self._page_size = page_size
        self._window_len = window_len
        self._holders = np.zeros(allocator.num_pages, dtype=np.int32)
        self._in_tree = np.zeros(allocator.num_pages, dtype=np.bool_)
        self._num_in_tree = 0
        self._num_held = 0

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def num_free(self) -> int:
        return self.allocator.num_free

    @property
    def cached_pages(self) -> int:
        return self._num_in_tree - self._num_held

    @property
    def protected_pages(self) -> int:
        return self._num_held

    def pages_for_span(self, num_tokens: int) -> int:
        """The most pages that are live at once in a sequence that grows by up to `num_tokens` tokens between two
        slides."""
        return pages_for(self._window_len + num_tokens, self._page_size) + 2

    def first_needed(self, length: int) -> int:
        """The oldest page that the query at position `length` sees."""
        return max(0, length - self._window_len + 1) // self._page_size

    def num_unheld(self, pages: PageArray) -> int:
        """How many of these pages of the tree would leave the evictable account if they were held."""
        return int(np.count_nonzero(self._holders[pages] == 0))

    def resumable(self, kv: SequenceKV, length: int) -> bool:
        """Whether the pages that a query at position `length` sees are there. `length` must not exceed the table."""
        assert kv.window is not None
        return kv.window.is_live(self.first_needed(length), pages_for(length, self._page_size))

    def longest_resumable(self, entries: PageArray) -> int:
        """The most pages that a sequence can start from, on a cached prefix with these window pages (GONE among
        them)."""
        pages = np.arange(len(entries))
        needed_from = np.maximum(0, (pages + 1) * self._page_size - self._window_len + 1) // self._page_size
        # Usable up to a page if the last gone one up to it lies before what a query behind it needs.
        last_gone = np.maximum.accumulate(np.where(entries == GONE, pages, -1))
        usable = np.flatnonzero(last_gone < needed_from)
        return int(usable[-1]) + 1 if len(usable) else 0

    def begin(self, kv: SequenceKV, entries: PageArray) -> None:
        """Starts a sequence on a cached prefix. It holds the prefix's window pages that it sees."""
        assert kv.window is not None
        first = self.first_needed(len(entries) * self._page_size)
        pages = entries[first:]
        self._hold(pages)
        kv.window.start_at(first, pages)

    def take(self, kv: SequenceKV, count: int) -> bool:
        """Adds `count` private pages. False, and nothing changed, if too few are free."""
        assert kv.window is not None
        pages = self.allocator.allocate(count, kv.window.last_page, kv.holder)
        if pages is None:
            return False
        kv.window.grow(pages)
        kv.account.window += count
        return True

    def cut(self, kv: SequenceKV, num_pages: int) -> None:
        """Drops entries from `num_pages` on. Call before the full table's protected length changes."""
        assert kv.window is not None
        self._drop(kv, num_pages, kv.window.num_pages)
        kv.window.cut(num_pages)

    def slide(self, kv: SequenceKV, keep_len: int) -> None:
        """Frees what has left the window, except what a rollback to `keep_len` tokens would need (0: nothing)."""
        table = kv.window
        assert table is not None
        bound = self._oldest_kept(kv.committed_len)
        low = min(bound, self._oldest_kept(keep_len)) if keep_len else bound
        if low > table.first:
            self._drop(kv, table.first, low)
            table.first = low
        if table.gap_end <= table.first:
            table.gap_start = table.gap_end = table.first
        if keep_len:
            keep_end = pages_for(keep_len, self._page_size)
            start = max(table.gap_end, keep_end)
            if bound > start:
                self._drop(kv, start, bound)
                table.gap_start, table.gap_end = keep_end, bound

    def share(self, kv: SequenceKV, tree: RadixTree, known_page: int, end_page: int) -> None:
        """The tree takes over the sequence's window pages up to `end_page`; the sequence still holds them.

        The tree had the entries below `known_page` already: it keeps its own page where it has one. `kv.node` is the
        tree's node at `end_page`; the protected length is still the old one.
        """
        table, node = kv.window, kv.node
        assert table is not None
        assert node is not None
        tree_pages = tree.path_window(node)
        start = max(table.first, kv.num_protected_pages)
        for index in range(start, end_page):
            own, cached = int(table.pages[index]), int(tree_pages[index])
            if own == GONE:
                continue
            kv.account.window -= 1
            page = np.array([own], dtype=np.int32)
            if index < known_page and cached != GONE:
                self._hold(tree_pages[index : index + 1])
                table.replace(index, cached)
                self.allocator.free(page, kv.holder, "freed as a duplicate")
            else:
                tree.place_window(node, index, own)
                self._adopt(page)
                self.allocator.journal.note(page, "shared", kv.holder)

    def disown(self, pages: PageArray) -> int:
        """Frees pages evicted from the tree, GONE among them; returns how many. Raises BooksError if a sequence still
        holds one."""
        pages = pages[pages != GONE]
        if self._holders[pages].any():
            raise BooksError(f"window pages {pages[self._holders[pages] > 0].tolist()} evicted while held")
        self._in_tree[pages] = False
        self._num_in_tree -= len(pages)
        self.allocator.free(pages, operation="evicted")
        return len(pages)

    def evict(self, tree: RadixTree, num_pages: int) -> int:
        """Frees at least `num_pages` of the tree's unheld window pages if there are that many; returns how many."""
        return self.disown(tree.strip_window(num_pages, self._holders == 0))

    def claims(self) -> Iterator[tuple[str, PageArray]]:
        """Free pages and the tree's, each under its account."""
        yield "free", self.allocator.free_pages()
        yield "protected", np.flatnonzero(self._in_tree & (self._holders > 0)).astype(np.int32)
        yield "cached", np.flatnonzero(self._in_tree & (self._holders == 0)).astype(np.int32)

    def hold_mismatches(self, holders: PageArray, tree: RadixTree) -> list[str]:
        """What is wrong with the tree's window pages, given how many sequences hold each page."""
        wrong = np.flatnonzero(holders != self._holders).tolist()
        listed = tree.window_pages()
        mismatches = [
            f"pool window: page {page} is held by {int(holders[page])}, not {int(self._holders[page])}"
            for page in wrong
        ]
        if not np.array_equal(np.sort(listed), np.flatnonzero(self._in_tree)):
            mismatches.append("pool window: the prefix tree's pages are not those that count as its own")
        return mismatches

    def _oldest_kept(self, length: int) -> int:
        """The oldest page that stays when `length` tokens are committed. It is needed to continue from one token less
        (the last token is computed again for its logits), or from the last whole page (sequences that share the
        prefix)."""
        whole = length - length % self._page_size
        return max(0, min(length, whole + 1) - self._window_len) // self._page_size

    def _drop(self, kv: SequenceKV, start: int, end: int) -> None:
        """Drops entries start .. end-1: the tree's pages are no longer held, private ones are freed."""
        table, protected = kv.window, kv.num_protected_pages
        assert table is not None
        self._unhold(table.live(start, min(end, protected)))
        private = table.live(max(start, protected), end).copy()
        kv.account.window -= len(private)
        self.allocator.free(private, kv.holder)
        table.forget(start, end)

    def _hold(self, pages: PageArray) -> None:
        self._num_held += self.num_unheld(pages)
        self._holders[pages] += 1

    def _unhold(self, pages: PageArray) -> None:
        self._holders[pages] -= 1
        if (self._holders[pages] < 0).any():
            raise BooksError("window pages given up more often than held")
        self._num_held -= self.num_unheld(pages)

    def _adopt(self, pages: PageArray) -> None:
        self._in_tree[pages] = True
        self._num_in_tree += len(pages)
        self._hold(pages)
