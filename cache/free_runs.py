"""FreeRuns: the free pages of a pool as ascending runs, found at a cost that does not depend on the pool's size."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

_HEAP_SLACK = 64


def ascending_runs(pages: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Splits the pages, in their order, into ascending runs: the first page of each, and the page after its last."""
    if len(pages) <= 1:
        return [(page, page + 1) for page in pages.tolist()]
    breaks = np.flatnonzero(np.diff(pages) != 1)
    firsts = [int(pages[0]), *pages[breaks + 1].tolist()]
    lasts = [*pages[breaks].tolist(), int(pages[-1])]
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


class FreeRuns:
    """Runs are as long as possible: no two of them touch. An operation costs the logarithm of their number.

    The heap has an entry (-length, end) for each run. The entry of a run that became shorter or vanished may still have
    the old length; it is corrected when it gets to the top.
    """

    def __init__(self, num_pages: int) -> None:
        self._end_of = {0: num_pages}
        self._start_of = {num_pages: 0}
        self._by_length = [(-num_pages, num_pages)]

    def __len__(self) -> int:
        return len(self._end_of)

    def length_at(self, start: int) -> int:
        """How many pages are free from `start` on, if a run begins there; else 0."""
        return self._end_of.get(start, start) - start

    def largest(self) -> tuple[int, int]:
        """First page and length of the longest run; of equally long ones, the first. There must be a free page."""
        while True:
            negative, end = self._by_length[0]
            length = end - self._start_of.get(end, end)
            if length == -negative:
                return end - length, length
            if length:
                heapreplace(self._by_length, (-length, end))
            else:
                heappop(self._by_length)

    def take(self, start: int, offset: int, count: int) -> None:
        """Removes `count` pages, the first of which lies `offset` pages into the run that begins at `start`."""
        end = self._end_of.pop(start)
        first, rest = start + offset, start + offset + count
        assert rest <= end
        if rest < end:
            self._end_of[rest] = end
            self._start_of[end] = rest
        else:
            del self._start_of[end]
        if offset:
            self._put(start, first)

    def add(self, start: int, end: int) -> None:
        """Pages start .. end-1, none of which may be free yet, join their neighbours."""
        end = self._end_of.pop(end, end)
        before = self._start_of.pop(start, None)
        self._put(start if before is None else before, end)

    def _put(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        heappush(self._by_length, (start - end, end))
        if len(self._by_length) > 2 * len(self._end_of) + _HEAP_SLACK:
            self._by_length = [(start - end, end) for start, end in self._end_of.items()]
            heapify(self._by_length)
