"""Deadlines: a heap that finds the names that are due without looking at the others.

Most deadlines only ever move later, as that of an idle session does with each use. So an entry in the heap is corrected
only when it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

_FEWEST_COMPACTED = 64


class Deadlines:
    """Each watched name has an entry in the heap, at its deadline or earlier. `due_at` returns a name's current
    deadline, in seconds on any clock (None: the name is no longer watched). One owner.
    """

    def __init__(self, due_at: Callable[[str], float | None]) -> None:
        self._due_at = due_at
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """The number of entries in the heap, including outdated ones."""
        return len(self._heap)

    def watch(self, name: str, at_s: float) -> None:
        """Watches a new name, or an earlier deadline of a known one. A deadline that moves later needs no call.
        O(log n)."""
        heapq.heappush(self._heap, (at_s, name))

    def watch_all(self, names: Iterable[str]) -> None:
        """Watches these names and no others. O(n)."""
        self._heap = [(at_s, name) for name in names if (at_s := self._due_at(name)) is not None]
        heapq.heapify(self._heap)

    def due(self, now_s: float) -> list[str]:
        """The names whose deadline has passed. They stay watched while they exist. O((these + outdated entries) ·
        log n), and each entry is outdated once."""
        due: dict[str, float] = {}
        while self._heap and self._heap[0][0] < now_s:
            name = self._heap[0][1]
            at_s = None if name in due else self._due_at(name)
            if at_s is not None and at_s >= now_s:
                heapq.heapreplace(self._heap, (at_s, name))
                continue
            heapq.heappop(self._heap)
            if at_s is not None:
                due[name] = at_s
        for name, at_s in due.items():
            heapq.heappush(self._heap, (at_s, name))
        return list(due)

    def soonest_s(self) -> float | None:
        """No name becomes due before this time. Names that were due at the last look also count."""
        return self._heap[0][0] if self._heap else None

    def forget_outdated(self, watched: int) -> None:
        """Keeps the number of entries in proportion to `watched`, the number of watched names. O(1), amortized."""
        if len(self._heap) > max(_FEWEST_COMPACTED, 2 * watched):
            self.watch_all({name for _, name in self._heap})
