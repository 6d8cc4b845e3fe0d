"""PageAllocator: which pages of one pool are free. Detects double frees; prefers ascending runs. PageCounts: numbers of
pages of both pools."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.free_runs import FreeRuns, ascending_runs
from cache.journal import NOBODY, Holder, PageJournal

PageArray: TypeAlias = NDArray[np.int32]
"""Page numbers, in the order of the tokens they hold."""


class BooksError(RuntimeError):
    """An invariant of the KV books is broken: a bug in Kedge, never a user's mistake."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Numbers of pages of the full pool and of the window pool (0 without one). A difference may be negative."""

    full: int = 0
    window: int = 0

    def __add__(self, other: PageCounts) -> PageCounts:
        return PageCounts(self.full + other.full, self.window + other.window)

    def __sub__(self, other: PageCounts) -> PageCounts:
        return PageCounts(self.full - other.full, self.window - other.window)

    def fits_in(self, room: PageCounts) -> bool:
        """Whether `room` has as many in each pool."""
        return self.full <= room.full and self.window <= room.window


NO_PAGES = PageCounts()


def no_pages() -> PageArray:
    return np.empty(0, dtype=np.int32)


class PageAllocator:
    """Owns the free set of a pool of `num_pages` pages, and the journal of what happened to each.

    A sequence that grows gets the pages right after its last one if they are free. A new sequence starts in the middle
    of the largest gap. So most sequences stay one ascending run, which a kernel reads as a slice. The cost of neither
    depends on the pool's size.
    """

    def __init__(self, num_pages: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self._is_free = bytearray(b"\1" * num_pages)
        self._runs = FreeRuns(num_pages)
        self._num_free = num_pages
        self.journal = PageJournal(num_pages, clock_s)

    @property
    def num_pages(self) -> int:
        return len(self._is_free)

    @property
    def num_free(self) -> int:
        return self._num_free

    def free_pages(self) -> PageArray:
        return np.flatnonzero(np.frombuffer(self._is_free, dtype=np.bool_)).astype(np.int32)

    def allocate(self, count: int, after: int | None = None, holder: Holder = NOBODY) -> PageArray | None:
        """Takes `count` pages, in a run after page `after` if possible. None, and nothing taken, if too few are
        free."""
        if count > self._num_free:
            return None
        if count == 0:
            return no_pages()
        self._num_free -= count
        if after is not None and self._runs.length_at(after + 1) >= count:
            return self._take(after + 1, 0, count, holder)
        return self._take_fresh(count, holder)

    def free(self, pages: PageArray, holder: Holder = NOBODY, operation: str = "freed") -> None:
        """Gives pages back. Raises BooksError, and changes nothing, if one is free already or named twice."""
        if len(pages) == 0:
            return
        runs = ascending_runs(pages)
        if self._any_free(runs) or _overlap(runs):
            twice = [int(page) for page in pages if self._is_free[page]]
            last = f"; page {twice[0]}: {self.journal.last(twice[0])}" if twice else ""
            raise BooksError(f"double free of pages {twice or pages.tolist()} by {holder}{last}")
        self._num_free += len(pages)
        for start, end in runs:
            self._is_free[start:end] = b"\1" * (end - start)
            self._runs.add(start, end)
            self.journal.note_run(start, end, operation, holder)

    def _take_fresh(self, count: int, holder: Holder) -> PageArray:
        """Takes pages from the largest gap. If no gap has so many, takes several gaps, the largest first, to make few
        runs."""
        parts: list[PageArray] = []
        while True:
            start, length = self._runs.largest()
            if length >= count:
                # In a gap that follows a sequence's pages, the first half is left for that sequence to grow into.
                offset = min(length // 2, length - count) if start > 0 and not parts else 0
                parts.append(self._take(start, offset, count, holder))
                return parts[0] if len(parts) == 1 else np.concatenate(parts)
            parts.append(self._take(start, 0, length, holder))
            count -= length

    def _take(self, start: int, offset: int, count: int, holder: Holder) -> PageArray:
        """Takes pages from the gap that begins at page `start`."""
        self._runs.take(start, offset, count)
        first, end = start + offset, start + offset + count
        self._is_free[first:end] = bytes(count)
        self.journal.note_run(first, end, "allocated", holder)
        return np.arange(first, end, dtype=np.int32)

    def _any_free(self, runs: list[tuple[int, int]]) -> bool:
        return any(self._is_free.find(1, start, end) >= 0 for start, end in runs)


def _overlap(runs: list[tuple[int, int]]) -> bool:
    ordered = sorted(runs)
    return any(start < end for (_, end), (start, _) in pairwise(ordered))
