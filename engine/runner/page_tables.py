"""The page tables of running sequences, kept on the device: a step sends only new entries.

Legend: P pools, R rows, M pages of the longest sequence, B items of a step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import BatchItem
from engine.device import send


class PageTables:
    """A run keeps its row until another needs it; the run whose last step was longest ago gives way. The table of a run
    without a row, or without a number (BatchItem.run is 0), is sent whole.

    `num_rows` is the most items that a step can have. Entries past a table's end are -1.
    """

    def __init__(self, num_pools: int, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.pages_PRM = torch.full((num_pools, num_rows, max_pages), -1, dtype=torch.int32, device=device)
        self._device = device
        self._row_of: OrderedDict[int, int] = OrderedDict()  # by run, the last used last
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def update(self, items: Sequence[BatchItem]) -> list[int]:
        """The rows of the items. Later work on the device finds their tables there."""
        for item in items:  # first, or another item might be given their rows
            if item.run in self._row_of:
                self._row_of.move_to_end(item.run)
        changes = _Changes(self.pages_PRM.shape)
        rows: list[int] = []
        fresh: list[int] = []
        for item in items:
            row = self._row_of.get(item.run)
            if row is None:
                row = self._take(item.run)
                fresh.append(row)
                changes.note(item, row, 0, 0)
            else:
                changes.note(item, row, item.known_pages, item.known_window_pages)
            rows.append(row)
        if fresh:
            self.pages_PRM.index_fill_(1, send(fresh, torch.int64, self._device), -1)
        if changes.places:
            places_C, pages_C = send(changes.joined(), torch.int64, self._device).view(2, -1)
            self.pages_PRM.view(-1).index_copy_(0, places_C, pages_C.int())
        self._free_rows += [row for item, row in zip(items, rows, strict=True) if not item.run]
        return rows

    def forget(self, items: Iterable[BatchItem]) -> None:
        """Forgets the rows of these items: a step of theirs ran elsewhere, so what their `known_pages` counts is not
        all here."""
        for item in items:
            row = self._row_of.pop(item.run, None)
            if row is not None:
                self._free_rows.append(row)

    def _take(self, run: int) -> int:
        if not self._free_rows:
            self._free_rows.append(self._row_of.popitem(last=False)[1])
        row = self._free_rows.pop()
        if run:
            self._row_of[run] = row
        return row


class _Changes:
    """Entries to change: their places in memory, and their new values."""

    def __init__(self, shape: Sequence[int]) -> None:
        _, self._num_rows, self._max_pages = shape
        self.places: list[NDArray[np.int64]] = []
        self.pages: list[NDArray[np.int32]] = []

    def note(self, item: BatchItem, row: int, first: int, first_in_window: int) -> None:
        """Notes the item's tables from these entries on."""
        self._note(row, item.pages, first)
        if item.window_pages is not None:
            self._note(self._num_rows + row, item.window_pages, first_in_window)

    def _note(self, row: int, pages: NDArray[np.int32], first: int) -> None:
        """`row` counts over the rows of all pools."""
        end = min(len(pages), self._max_pages)
        if first < end:
            self.places.append(np.arange(row * self._max_pages + first, row * self._max_pages + end))
            self.pages.append(pages[first:end])

    def joined(self) -> NDArray[np.int64]:
        return np.concatenate((*self.places, *self.pages), dtype=np.int64)
