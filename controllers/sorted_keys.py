"""A sorted set of texts that is read in pages from any text on. It is many short sorted lists, like a B-tree's
leaves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

_MOST_IN_PART = 512


class SortedKeys:
    """A sorted set. Adding or discarding is O(log n + size of a part), beginning to read O(log n). One owner."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        in_order = sorted(set(keys))
        half = _MOST_IN_PART // 2
        self._parts = [in_order[at : at + half] for at in range(0, len(in_order), half)]
        self._firsts = [part[0] for part in self._parts]

    def add(self, key: str) -> None:
        """Adds a key, which must not be there yet."""
        if not self._parts:
            self._parts, self._firsts = [[key]], [key]
            return
        at = max(0, bisect_right(self._firsts, key) - 1)
        part = self._parts[at]
        insort(part, key)
        self._firsts[at] = part[0]
        if len(part) > _MOST_IN_PART:
            later = part[_MOST_IN_PART // 2 :]
            del part[_MOST_IN_PART // 2 :]
            self._parts.insert(at + 1, later)
            self._firsts.insert(at + 1, later[0])

    def discard(self, key: str) -> None:
        """Removes a key, which must be there."""
        at = bisect_right(self._firsts, key) - 1
        part = self._parts[at]
        del part[bisect_left(part, key)]
        if part:
            self._firsts[at] = part[0]
        else:
            del self._parts[at], self._firsts[at]

    def after(self, key: str) -> Iterator[str]:
        """The keys after `key`, in order. `key` need not be in the set. The set must not change meanwhile."""
        at = max(0, bisect_right(self._firsts, key) - 1)
        begin = bisect_right(self._parts[at], key) if self._parts else 0
        for part in self._parts[at:]:
            yield from part[begin:]
            begin = 0

    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            yield from part
