"""A sorted set of texts, or of times with texts, that is read in pages from any key on. It is many short sorted lists,
like a B-tree's leaves."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", str, tuple[float, str])

_MOST_IN_PART = 512


class SortedKeys(Generic[K]):
    """A sorted set. Adding or discarding is O(log n + size of a part), beginning to read O(log n). One owner."""

    def __init__(self, keys: Iterable[K] = ()) -> None:
        in_order: list[K] = sorted(set(keys))
        half = _MOST_IN_PART // 2
        self._parts: list[list[K]] = [in_order[at : at + half] for at in range(0, len(in_order), half)]
        self._firsts: list[K] = [part[0] for part in self._parts]

    def add(self, key: K) -> None:
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

    def discard(self, key: K) -> None:
        """Removes a key, which must be there."""
        at = bisect_right(self._firsts, key) - 1
        part = self._parts[at]
        del part[bisect_left(part, key)]
        if part:
            self._firsts[at] = part[0]
        else:
            del self._parts[at], self._firsts[at]

    def after(self, key: K) -> Iterator[K]:
        """The keys after `key`, in order. `key` need not be in the set. The set must not change while it is read on."""
        at = max(0, bisect_right(self._firsts, key) - 1)
        begin = bisect_right(self._parts[at], key) if self._parts else 0
        for index in range(at, len(self._parts)):
            yield from self._parts[index][begin:]
            begin = 0

    def __iter__(self) -> Iterator[K]:
        for part in self._parts:
            yield from part
