"""Deadlines: finds the names that are due without looking at the others.

Most deadlines only ever move later, as that of an idle session does with each use. So a name is filed at its deadline
or earlier, and its place is corrected only when it comes up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from controllers.sorted_keys import SortedKeys

_BEFORE_ALL = (float("-inf"), "")


class Deadlines:
    """Each watched name is filed once. `due_at` returns a watched name's current deadline, in seconds on any clock. One
    owner.
    """

    def __init__(self, due_at: Callable[[str], float]) -> None:
        self._due_at = due_at
        self._filed_s: dict[str, float] = {}
        self._in_order: SortedKeys[tuple[float, str]] = SortedKeys()

    def __len__(self) -> int:
        """The number of watched names."""
        return len(self._filed_s)

    def watch(self, name: str, at_s: float) -> None:
        """Watches a new name, or an earlier deadline of a known one. A deadline that moves later needs no call.
        O(log n)."""
        before_s = self._filed_s.get(name)
        if before_s is None or at_s < before_s:
            self._file(name, at_s)

    def watch_all(self, names: Iterable[str]) -> None:
        """Watches these names and no others. O(n log n)."""
        self._filed_s = {name: self._due_at(name) for name in names}
        self._in_order = SortedKeys((at_s, name) for name, at_s in self._filed_s.items())

    def forget(self, name: str) -> None:
        """Watches the name, which must be watched, no longer. O(log n)."""
        self._in_order.discard((self._filed_s.pop(name), name))

    def due(self, now_s: float) -> Iterator[str]:
        """The names whose deadline has passed, roughly in that order. They stay watched. It looks at a name only when
        it is asked for the next one, and names may be watched and forgotten meanwhile. O(log n) for each that it looks
        at."""
        filed = _BEFORE_ALL
        while (filed := next(self._in_order.after(filed), (now_s, ""))) < (now_s, ""):
            name = filed[1]
            at_s = self._due_at(name)
            if at_s < now_s:
                yield name
            else:
                self._file(name, at_s)

    def soonest_s(self) -> float | None:
        """No name becomes due before this time. Names that were due at the last look also count."""
        return next((at_s for at_s, _ in self._in_order), None)

    def _file(self, name: str, at_s: float) -> None:
        if name in self._filed_s:
            self.forget(name)
        self._filed_s[name] = at_s
        self._in_order.add((at_s, name))
