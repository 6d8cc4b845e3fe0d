"""Who is due, found without looking at those who are not: a heap, corrected when an entry of it comes up.

Most deadlines only ever move away, as an idle session's with each use. They are left as they are until then.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

_FEWEST_COMPACTED = 64


class Deadlines:
    """Of each that is watched there is an entry at its deadline or before. `due_at` gives the deadline as it is now, in
    seconds on whatever clock; None: there is no such one any more. One owner.
    """

    def __init__(self, due_at: Callable[[str], float | None]) -> None:
        self._due_at = due_at
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Entries, outdated ones included."""
        return len(self._heap)

    def watch(self, name: str, at_s: float) -> None:
        """From now on, or from an earlier time on than before: a deadline that moves away needs no word. O(log n)."""
        heapq.heappush(self._heap, (at_s, name))

    def watch_all(self, names: Iterable[str]) -> None:
        """These and no others. O(n)."""
        self._heap = [(at_s, name) for name in names if (at_s := self._due_at(name)) is not None]
        heapq.heapify(self._heap)

    def due(self, now_s: float) -> list[str]:
        """Those whose deadline has passed; they stay watched for as long as they are there. O((those + entries that
        were outdated) · log n), and each entry is outdated once."""
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
        """Before that none is due. What was due when it was last looked for is not told from what is."""
        return self._heap[0][0] if self._heap else None

    def forget_outdated(self, watched: int) -> None:
        """Keeps the entries in proportion to those that are watched, of which there are so many. O(1), amortized."""
        if len(self._heap) > max(_FEWEST_COMPACTED, 2 * watched):
            self.watch_all({name for _, name in self._heap})
