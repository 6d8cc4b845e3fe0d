"""PageAllocator: which pages of one pool are free. Detects double frees; prefers ascending runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.journal import NOBODY, Owner, PageJournal

PageArray: TypeAlias = NDArray[np.int32]
"""Page numbers, in the order of the tokens they hold."""


class BooksError(RuntimeError):
    """An invariant of the KV books is broken: a bug in Kedge, never a user's mistake."""


def no_pages() -> PageArray:
    return np.empty(0, dtype=np.int32)


class PageAllocator:
    """Owns the free set of a pool of `num_pages` pages, and the journal of what happened to each.

    A sequence that grows is given the pages right after its last one when they are free, and a new sequence
    starts in the middle of the largest gap, so that most sequences stay one ascending run: a kernel reads a slice.
    """

    def __init__(self, num_pages: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._num_free = num_pages
        self.journal = PageJournal(num_pages, clock_s)

    @property
    def num_pages(self) -> int:
        return len(self._is_free)

    @property
    def num_free(self) -> int:
        return self._num_free

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])

    def free_pages(self) -> PageArray:
        return np.flatnonzero(self._is_free).astype(np.int32)

    def allocate(self, count: int, after: int | None = None, owner: Owner = NOBODY) -> PageArray | None:
        """Takes `count` pages, in a run after page `after` if possible. None, nothing taken, if too few are free."""
        if count > self._num_free:
            return None
        if count == 0:
            return no_pages()
        pages = self._run_after(after, count) if after is not None else None
        if pages is None:
            pages = self._fresh_run(count)
        self._is_free[pages] = False
        self._num_free -= count
        self.journal.note(pages, "allocated", owner)
        return pages

    def free(self, pages: PageArray, owner: Owner = NOBODY, operation: str = "freed") -> None:
        """Gives pages back. Raises BooksError, and changes nothing, if one is free already or named twice."""
        count = len(pages)
        if count == 0:
            return
        if self._is_free[pages].any() or (count > 1 and len(np.unique(pages)) != count):
            twice = [int(page) for page in pages if self._is_free[page]]
            last = f"; page {twice[0]}: {self.journal.last(twice[0])}" if twice else ""
            raise BooksError(f"double free of pages {twice or pages.tolist()} by {owner}{last}")
        self._is_free[pages] = True
        self._num_free += count
        self.journal.note(pages, operation, owner)

    def _run_after(self, after: int, count: int) -> PageArray | None:
        first = after + 1
        if first + count > self.num_pages or not self._is_free[first : first + count].all():
            return None
        return np.arange(first, first + count, dtype=np.int32)

    def _fresh_run(self, count: int) -> PageArray:
        free = np.flatnonzero(self._is_free)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(free) > 1) + 1))
        lengths = np.diff(np.concatenate((starts, [len(free)])))
        largest = int(np.argmax(lengths))
        start, length = int(starts[largest]), int(lengths[largest])
        if length < count:
            return free[:count].astype(np.int32)
        # A gap that follows somebody's pages leaves its first half to that neighbour's growth.
        offset = min(length // 2, length - count) if free[start] > 0 else 0
        return free[start + offset : start + offset + count].astype(np.int32)
