"""Where an idle session's KV is kept when the device's pages are needed: host memory, then a disk, each within a
budget.

Copies run beside compute. The cache orders them (CopyOrder); the runner copies and reports when each is done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from cache.audit import TierAccounts
from cache.pages import PageArray
from cache.token_chain import TokenChain


@dataclass(frozen=True, slots=True)
class PoolPages:
    """Pages of each pool: of the layers with full attention, and of those with a sliding window (empty without)."""

    full: PageArray
    window: PageArray


class CopyKind(Enum):
    SAVE = auto()  # device pages to host memory under a key
    SPILL = auto()  # what is in host memory under `source` to the disk as well, under a key
    LOAD = auto()  # what is under a key, on host or disk, to device pages
    DROP = auto()  # forget what is under a key
    CLONE = auto()  # device pages to other device pages, at once


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """One order to the runner, to be carried out in sequence. SAVE, SPILL and LOAD are answered when done, by `key`."""

    kind: CopyKind
    key: int
    pages: PoolPages | None = None
    target: PoolPages | None = None
    source: int = 0


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Budgets of the tiers below the device, and the bytes that a page of each pool takes there."""

    host_bytes: int = 0
    disk_bytes: int = 0
    page_bytes: int = 1
    window_page_bytes: int = 0

    def size_bytes(self, pages: PoolPages) -> int:
        return len(pages.full) * self.page_bytes + len(pages.window) * self.window_page_bytes


@dataclass(slots=True)
class StoredKV:
    """A session's KV in one tier, or on its way there: enough to build its SequenceKV again.

    `chain` has the tokens of this KV, except those that were cut off meanwhile. The first `window_first` window pages
    were already gone. While any of `copies` works on it, its bytes stay taken, even if the session is gone. An entry
    that is no longer wanted is removed with the last of its copies. `saved`: the runner has something under the key,
    which must be dropped in the end.
    """

    key: int
    session_id: str
    namespace: str
    chain: TokenChain
    committed_len: int
    draft_len: int
    window_first: int
    num_bytes: int
    on_disk: bool = False
    copies: int = 0
    wanted: bool = True
    saved: bool = False

    @property
    def tier(self) -> str:
        return "disk" if self.on_disk else "host"


class Tier:
    """Owns the byte budget of one place and its entries, longest there first."""

    def __init__(self, name: str, budget_bytes: int = 0) -> None:
        self._name = name
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[int, StoredKV] = OrderedDict()
        self._used_bytes = 0

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    def accounts(self) -> TierAccounts:
        return TierAccounts(self._budget_bytes, self._used_bytes, len(self._entries))

    def missing_bytes(self, num_bytes: int) -> int:
        """Bytes to free before `num_bytes` fit; zero or less if they fit."""
        return self._used_bytes + num_bytes - self._budget_bytes

    def add(self, entry: StoredKV) -> None:
        self._entries[entry.key] = entry
        self._used_bytes += entry.num_bytes

    def remove(self, key: int) -> None:
        self._used_bytes -= self._entries.pop(key).num_bytes

    def settled(self) -> Iterator[StoredKV]:
        """Entries that no copy works on, longest there first."""
        return (entry for entry in self._entries.values() if not entry.copies)

    def mismatches(self) -> list[str]:
        """What a recount of the budget finds wrong."""
        counted = sum(entry.num_bytes for entry in self._entries.values())
        wrong = []
        if counted != self._used_bytes:
            wrong.append(f"{self._name}: {self._used_bytes} bytes by counter, {counted} by walk")
        if self._used_bytes > self._budget_bytes:
            wrong.append(f"{self._name}: {self._used_bytes} bytes used of a budget of {self._budget_bytes}")
        return wrong
