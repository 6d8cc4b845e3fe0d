"""WindowTable: where one sequence's sliding-window KV lies, and what is gone of it."""

from __future__ import annotations

import numpy as np

from cache.pages import PageArray

GONE = -1
_INITIAL_CAPACITY = 16


class WindowTable:
    """Entry i is the window page of the tokens from i * page_size on, or GONE. There are as many entries as in the full
    table.

    Live entries are those from `first` on, except the gap [gap_start, gap_end). The gap is what a turn has slid past;
    the pages before it are kept for the turn's rollback. Lengths are in pages. Only cache/window.py changes a table.
    `sent_pages` is as in SequenceKV.
    """

    __slots__ = ("_buffer", "first", "gap_end", "gap_start", "num_pages", "sent_pages")

    def __init__(self) -> None:
        self._buffer = np.empty(_INITIAL_CAPACITY, dtype=np.int32)
        self.num_pages = 0
        self.first = 0
        self.gap_start = 0
        self.gap_end = 0
        self.sent_pages = 0

    @property
    def pages(self) -> PageArray:
        """Read-only by convention: a view, valid until the sequence next changes."""
        return self._buffer[: self.num_pages]

    @property
    def last_page(self) -> int | None:
        page = int(self._buffer[self.num_pages - 1]) if self.num_pages else GONE
        return None if page == GONE else page

    def live(self, start: int = 0, end: int | None = None) -> PageArray:
        """Pages that are still there among entries start .. end-1."""
        entries = self._buffer[max(start, self.first) : self.num_pages if end is None else end]
        return entries.compress(entries != GONE)

    def num_private(self, num_protected: int) -> int:
        """Live pages past the protected prefix."""
        start = max(self.first, num_protected)
        gap = max(0, min(self.gap_end, self.num_pages) - max(self.gap_start, start))
        return max(0, self.num_pages - start) - gap

    def is_live(self, start: int, end: int) -> bool:
        """True if every entry start .. end-1 is there."""
        return self.first <= start and not bool((self._buffer[start:end] == GONE).any())

    def grow(self, pages: PageArray) -> None:
        end = self.num_pages + len(pages)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int32)
            grown[: self.num_pages] = self.pages
            self._buffer = grown
        self._buffer[self.num_pages : end] = pages
        self.num_pages = end

    def start_at(self, first: int, pages: PageArray) -> None:
        """Gives an empty table `first` entries that are gone already, then `pages`."""
        assert self.num_pages == 0
        self.grow(np.full(first, GONE, dtype=np.int32))
        self.grow(pages)
        self.first = self.gap_start = self.gap_end = first

    def replace(self, index: int, page: int) -> None:
        self._buffer[index] = page
        self.sent_pages = min(self.sent_pages, index)

    def forget(self, start: int, end: int) -> None:
        """Marks entries start .. end-1 as gone. The caller has settled their pages, and adjusts the limits."""
        self._buffer[start:end] = GONE
        self.sent_pages = min(self.sent_pages, start)

    def cut(self, num_pages: int) -> None:
        """Keeps only the first `num_pages` entries. Every limit is capped too, or pages would be freed twice."""
        self.num_pages = min(self.num_pages, num_pages)
        self.first = min(self.first, self.num_pages)
        self.gap_start = min(self.gap_start, self.num_pages)
        self.gap_end = min(self.gap_end, self.num_pages)
        self.sent_pages = min(self.sent_pages, self.num_pages)
