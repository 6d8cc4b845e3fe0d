"""Where an idle session's KV lives when the device's pages are needed: host memory within a byte budget.

Copies run beside compute. The cache says what is to be copied (CopyOrder), the runner copies, and says when it is done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from cache.audit import HostAccounts
from cache.pages import PageArray


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of each pool: of the layers with full attention, and of those with a sliding window (empty without)."""

    full: PageArray
    window: PageArray


@dataclass(frozen=True, slots=True)
class PageNeed:
    """So many pages of each pool."""

    full: int = 0
    window: int = 0

    def __add__(self, other: PageNeed) -> PageNeed:
        return PageNeed(self.full + other.full, self.window + other.window)


class CopyKind(Enum):
    SAVE = auto()  # device pages to host memory under a key
    LOAD = auto()  # and back
    DROP = auto()  # forget what was saved
    CLONE = auto()  # device pages to other device pages, at once


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """One order to the runner, to be carried out in sequence. SAVE and LOAD are answered when done, by `key`."""

    kind: CopyKind
    key: int
    pages: PoolPages | None = None
    target: PoolPages | None = None


@dataclass(slots=True)
class HostEntry:
    """A session's KV in host memory, or on its way: enough to build its SequenceKV again.

    The first `window_first` window pages were gone. `settled` is False while a copy runs; then the entry's bytes stay
    taken, whatever becomes of the session. `saved`: the runner has something under the key, to be dropped some day.
    """

    key: int
    session_id: str
    namespace: str
    committed_len: int
    draft_len: int
    window_first: int
    num_bytes: int
    settled: bool = False
    saved: bool = False


class HostTier:
    """Owns the byte budget and its entries, least recently used first. Sizes of a page of each pool in bytes."""

    def __init__(self, budget_bytes: int = 0, page_bytes: int = 1, window_page_bytes: int = 0) -> None:
        self._budget_bytes = budget_bytes
        self._page_bytes = page_bytes
        self._window_page_bytes = window_page_bytes
        self._entries: OrderedDict[int, HostEntry] = OrderedDict()
        self._used_bytes = 0

    def accounts(self) -> HostAccounts:
        return HostAccounts(self._budget_bytes, self._used_bytes, len(self._entries))

    def size_bytes(self, pages: PoolPages) -> int:
        return len(pages.full) * self._page_bytes + len(pages.window) * self._window_page_bytes

    def missing_bytes(self, num_bytes: int) -> int:
        """What must be given up before `num_bytes` fit; none if not positive."""
        return self._used_bytes + num_bytes - self._budget_bytes

    def add(self, entry: HostEntry) -> None:
        self._entries[entry.key] = entry
        self._used_bytes += entry.num_bytes

    def remove(self, key: int) -> None:
        self._used_bytes -= self._entries.pop(key).num_bytes

    def settled(self) -> Iterator[HostEntry]:
        """Entries no copy works on, oldest first."""
        return (entry for entry in self._entries.values() if entry.settled)

    def mismatches(self) -> list[str]:
        """What a recount of the budget finds wrong."""
        counted = sum(entry.num_bytes for entry in self._entries.values())
        wrong = (
            []
            if counted == self._used_bytes
            else [f"host: {self._used_bytes} bytes by counter, {counted} by walk"]
        )
        if self._used_bytes > self._budget_bytes:
            wrong.append(f"host: {self._used_bytes} bytes used of a budget of {self._budget_bytes}")
        return wrong
