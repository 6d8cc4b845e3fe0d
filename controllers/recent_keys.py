"""RecentKeys: the most recently used of many keys, without looking at the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class RecentKeys:
    """The `most` keys that were used last and not forgotten since. Each use is O(1). It begins with the keys of
    `oldest_first`."""

    def __init__(self, most: int, oldest_first: Iterable[str] = ()) -> None:
        self._most = most
        self._keys: dict[str, None] = {}
        for key in oldest_first:
            self.used(key)

    def used(self, key: str) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]

    def forget(self, key: str) -> None:
        self._keys.pop(key, None)

    def newest_first(self) -> Iterator[str]:
        """The keys, newest first. The iterator is invalid once a key was used or forgotten."""
        return reversed(self._keys)
