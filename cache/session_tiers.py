"""SessionTiers: moves idle sessions' KV from the device to the host, back, or down to nothing but the token log."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from cache.audit import HostAccounts
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import PageAccount, SequenceKV
from cache.slots import SessionSlot, SlotState, SlotTable
from cache.tiers import CopyKind, CopyOrder, HostEntry, HostTier, PoolPages


class SessionTiers:
    """Owns the copies in flight and the orders not yet handed to the runner. `slots` and `account` are the cache's.

    Nothing ever waits for room on the host: a session that finds none is dropped at once. A copy that is no longer
    wanted runs to its end, and what it holds is given back then.
    """

    def __init__(self, inner: PrefixCache, slots: SlotTable, account: PageAccount, host: HostTier) -> None:
        self._inner = inner
        self._slots = slots
        self._account = account
        self._host = host
        self._keys = count(1)
        self._copies: dict[int, HostEntry] = {}
        self._orphans: dict[int, SequenceKV] = {}  # being loaded for a session that has gone
        self._orders: list[CopyOrder] = []
        self.num_to_host = 0
        self.num_to_log = 0
        self.num_promotions = 0

    @property
    def host(self) -> HostTier:
        return self._host

    @property
    def copies_in_flight(self) -> int:
        return len(self._copies)

    @property
    def orphans(self) -> Iterator[SequenceKV]:
        return iter(self._orphans.values())

    def accounts(self) -> HostAccounts:
        return self._host.accounts()

    def moving_pages(self, state: SlotState) -> tuple[int, int]:
        """Private pages of sessions being saved (they will be free) or loaded, in each pool."""
        full = window = 0
        for entry in self._copies.values():
            slot = self._slots.get(entry.session_id)
            if slot is not None and slot.entry is entry and slot.state is state and slot.kv is not None:
                full += slot.kv.num_private_pages
                if slot.kv.window is not None:
                    window += slot.kv.window.num_private(slot.kv.num_protected_pages)
        return full, window

    def take_orders(self) -> list[CopyOrder]:
        """Orders since the last call; the runner must carry them out in sequence, before the next step."""
        orders, self._orders = self._orders, []
        return orders

    def clone_page(self, source: SequenceKV, target: SequenceKV, index: int) -> None:
        """Page `index` of the target gets what the source's holds."""
        self._orders.append(CopyOrder(CopyKind.CLONE, 0, _page_at(source, index), _page_at(target, index)))

    def demote(self, slot: SessionSlot) -> None:
        """An idle session's pages are needed: its KV goes to the host, or away if there is no room."""
        assert slot.state is SlotState.IDLE
        kv = slot.kv
        assert kv is not None
        pages = _pages_of(kv)
        num_bytes = self._host.size_bytes(pages)
        if not self._make_host_room(num_bytes):
            self.discard(slot.session_id)
            self.num_to_log += 1
            return
        first = kv.window.first if kv.window is not None else 0
        entry = HostEntry(
            next(self._keys), slot.session_id, kv.namespace, kv.committed_len, kv.draft_len, first, num_bytes
        )
        self._host.add(entry)
        slot.entry = entry
        self._slots.move(slot, SlotState.SAVING)
        self._start(CopyKind.SAVE, entry, pages)

    def load(self, slot: SessionSlot, kv: SequenceKV) -> None:
        """Fills `kv`, whose pages are allocated, from the host; the slot holds it meanwhile."""
        entry = slot.entry
        assert entry is not None
        assert slot.state is SlotState.HOST
        slot.kv = kv
        self._slots.move(slot, SlotState.LOADING)
        entry.settled = False
        self._start(CopyKind.LOAD, entry, _pages_of(kv))

    def take_out(self, slot: SessionSlot) -> SequenceKV:
        """The KV of a slot whose KV is on the device; a save that runs comes to nothing."""
        kv = slot.kv
        assert kv is not None
        assert slot.state in (SlotState.IDLE, SlotState.SAVING)
        slot.kv, slot.entry = None, None
        self._slots.move(slot, SlotState.IDLE)
        return kv

    def discard(self, session_id: str) -> None:
        """The slot and its KV go, wherever they are, unless a turn has them. Unknown ids are fine."""
        slot = self._slots.get(session_id)
        if slot is None:
            return
        assert slot.state is not SlotState.LENT
        self._slots.remove(session_id)
        if slot.state is SlotState.LOADING:
            assert slot.entry is not None
            assert slot.kv is not None
            self._orphans[slot.entry.key] = slot.kv
        elif slot.kv is not None:
            self._inner.release(slot.kv)
        elif slot.entry is not None:
            self._drop(slot.entry)

    def copy_done(self, key: int, *, failed: bool = False) -> None:
        """The runner's answer to a SAVE or LOAD. What failed to be copied is computed again from the token log."""
        entry = self._copies.pop(key)
        entry.settled = True
        entry.saved |= not failed
        slot = self._slots.get(entry.session_id)
        if slot is not None and slot.entry is not entry:
            slot = None  # the session went on without this copy
        if key in self._orphans:
            self._inner.release(self._orphans.pop(key))
            self._drop(entry)
        elif slot is None:
            self._drop(entry)
        elif failed:
            assert slot.kv is not None
            self._inner.release(slot.kv)
            self._slots.remove(slot.session_id)
            self._drop(entry)
            self.num_to_log += 1
        elif slot.state is SlotState.SAVING:
            assert slot.kv is not None
            self._inner.release(slot.kv)
            slot.kv = None
            self._slots.move(slot, SlotState.HOST)
            self.num_to_host += 1
        else:
            assert slot.kv is not None
            slot.kv.commit(entry.committed_len, entry.draft_len)
            slot.entry = None
            self._slots.move(slot, SlotState.IDLE)
            self._drop(entry)
            self.num_promotions += 1

    def _make_host_room(self, num_bytes: int) -> bool:
        """Sessions longest on the host go, unless their turns wait. False, and none went, if that is not enough."""
        missing = self._host.missing_bytes(num_bytes)
        victims: list[str] = []
        for entry in self._host.settled():
            if missing <= 0:
                break
            if not self._slots.is_expected(entry.session_id):
                victims.append(entry.session_id)
                missing -= entry.num_bytes
        if missing > 0:
            return False
        for session_id in victims:
            self.discard(session_id)
            self.num_to_log += 1
        return True

    def _start(self, kind: CopyKind, entry: HostEntry, pages: PoolPages) -> None:
        self._copies[entry.key] = entry
        self._orders.append(CopyOrder(kind, entry.key, pages))

    def _drop(self, entry: HostEntry) -> None:
        self._host.remove(entry.key)
        if entry.saved:  # a save that failed left nothing
            self._orders.append(CopyOrder(CopyKind.DROP, entry.key))


def _pages_of(kv: SequenceKV) -> PoolPages:
    """All pages of an idle sequence, as they are now."""
    full = kv.pages.copy()
    return PoolPages(full, kv.window.live() if kv.window is not None else full[:0])


def _page_at(kv: SequenceKV, index: int) -> PoolPages:
    full = kv.pages[index : index + 1].copy()
    window = kv.window.pages[index : index + 1].copy() if kv.window is not None else full[:0]
    return PoolPages(full, window)
