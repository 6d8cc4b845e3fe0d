"""PageJournal: the last operation on each page, and for whom. Only the audit and error messages read it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache.free_runs import ascending_runs


@dataclass(frozen=True, slots=True)
class Holder:
    """The session and the request (the turn's) that a page was last used for."""

    session_id: str | None = None
    request_id: str | None = None

    def __str__(self) -> str:
        parts = [f"session {self.session_id}" if self.session_id is not None else "no session"]
        if self.request_id is not None:
            parts.append(f"request {self.request_id}")
        return ", ".join(parts)


NOBODY = Holder()


@dataclass(frozen=True, slots=True)
class PageTrace:
    """The last `operation` on a page, for `holder`, `age_s` seconds ago."""

    operation: str
    holder: Holder
    age_s: float

    def __str__(self) -> str:
        return f"last {self.operation} by {self.holder} {self.age_s:.1f} s ago"


class PageJournal:
    """One entry for each page, overwritten by the next operation."""

    def __init__(self, num_pages: int, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._operations: list[str | None] = [None] * num_pages
        self._holders: list[Holder] = [NOBODY] * num_pages
        self._times_s = array("d", bytes(8 * num_pages))

    def note(self, pages: NDArray[np.int32], operation: str, holder: Holder) -> None:
        for start, end in ascending_runs(pages):
            self.note_run(start, end, operation, holder)

    def note_run(self, start: int, end: int, operation: str, holder: Holder) -> None:
        """Notes an operation on pages start .. end-1."""
        count = end - start
        self._operations[start:end] = [operation] * count
        self._holders[start:end] = [holder] * count
        self._times_s[start:end] = array("d", [self._clock_s()]) * count

    def last(self, page: int) -> PageTrace | None:
        """None for a page that was never used."""
        operation = self._operations[page]
        if operation is None:
            return None
        return PageTrace(operation, self._holders[page], self._clock_s() - self._times_s[page])
