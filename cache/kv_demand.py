"""KVDemand: how much of the KV pools turns use, and how much they lack. What idle sessions hold is not demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache.lost_kv import LostKV
from cache.pages import PageCounts
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import pages_for
from cache.slots import SlotTable


class KVDemand:
    """Reads the books, changes nothing.

    Idle sessions give way to turns, to host memory or to the disk, so their KV is not demand. KV that was dropped
    because no tier had room, and was then missed, is demand. `need` says what sequences take of each pool for a
    number of pages each.
    """

    def __init__(
        self, inner: PrefixCache, slots: SlotTable, lost: LostKV, need: Callable[[Sequence[int]], PageCounts]
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._lost = lost
        self._need = need

    def utilization(self, waiting: Iterable[tuple[str | None, int]]) -> float:
        """Demand as a share of the pool, for the pool with less room; above 1 there is not enough for all.

        Demand is the pages that turns hold, shared ones counted once; the pages that `waiting` turns (session and
        number of tokens) will take, less what their sessions share; and the pages whose loss was felt recently
        (LostKV.missed).
        """
        page_size = self._inner.page_size
        lacking = [
            max(0, pages_for(num_tokens, page_size) - self._shared(session_id))
            for session_id, num_tokens in waiting
        ]
        demand = self._inner.held_pages() + self._need(lacking + self._lost.missed())
        share = demand.full / self._inner.num_pages
        window = self._inner.window
        return share if window is None else max(share, demand.window / window.num_pages)

    def _shared(self, session_id: str | None) -> int:
        slot = self._slots.get(session_id) if session_id is not None else None
        return slot.kv.num_protected_pages if slot is not None and slot.kv is not None else 0
