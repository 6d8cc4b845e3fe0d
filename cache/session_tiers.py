"""SessionTiers: moves idle sessions' KV from the device to the host, on to disk, back, or down to the token log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from cache.audit import TierAccounts
from cache.disk_pause import DiskPause
from cache.lost_kv import LostKV
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import PageAccount, SequenceKV, pages_for
from cache.slots import SessionSlot, SlotState, SlotTable
from cache.tiers import CopyKind, CopyOrder, PoolPages, StoredKV, Tier, TierSizes

SPARE_PART = 4
"""With a disk, one part in so many of the host's budget is kept free."""


class SessionTiers:
    """Owns the copies in flight and the orders not yet handed to the runner. `slots` and `account` are the cache's.
    `clock` returns monotonic seconds.

    Nothing ever waits for room on the host or disk: a session that finds none is dropped at once. So those longest on
    the host are written to disk before others need their room. A copy that is no longer wanted runs to its end, and
    what it holds is given back then.
    """

    def __init__(
        self,
        inner: PrefixCache,
        slots: SlotTable,
        account: PageAccount,
        sizes: TierSizes,
        clock: Callable[[], float],
    ) -> None:
        self.lost = LostKV(clock)
        self._inner = inner
        self._slots = slots
        self._account = account
        self._sizes = sizes
        self._host = Tier("host", sizes.host_bytes)
        self._disk = Tier("disk", sizes.disk_bytes)
        self._spare_bytes = sizes.host_bytes // SPARE_PART
        self._disk_pause = DiskPause(clock)
        self._keys = count(1)
        self._copies: dict[int, StoredKV] = {}
        self._write: tuple[StoredKV, StoredKV] | None = None  # from the host's entry to the disk's
        self._orphans: dict[int, SequenceKV] = {}  # being loaded for a session that has gone
        self._orders: list[CopyOrder] = []
        self.num_changes = 0  # copies to or from the device that ended, sessions whose KV went
        self.num_to_host = 0
        self.num_to_disk = 0
        self.num_to_log = 0
        self.num_from_host = 0
        self.num_from_disk = 0
        self.num_disk_failures = 0

    @property
    def copies_in_flight(self) -> int:
        """Those that bring device pages, or give them back."""
        return len(self._copies)

    @property
    def writing(self) -> bool:
        """From the host to the disk: nobody waits for that."""
        return self._write is not None

    @property
    def orphans(self) -> Iterator[SequenceKV]:
        return iter(self._orphans.values())

    def accounts(self) -> tuple[TierAccounts, TierAccounts]:
        """The host's and the disk's. What is being written to disk is in both."""
        return self._host.accounts(), self._disk.accounts()

    def mismatches(self) -> list[str]:
        """What a recount of both budgets finds wrong, and what is stored for nobody."""
        held = {slot.entry.key for slot in self._slots if slot.entry is not None}
        stray = [
            f"{entry.num_bytes} bytes of session {entry.session_id} are stored for nobody"
            for tier in (self._host, self._disk)
            for entry in tier.settled()
            if entry.key not in held
        ]
        return [*self._host.mismatches(), *self._disk.mismatches(), *stray]

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
        num_bytes = self._sizes.size_bytes(pages)
        if not self._make_room(self._host, num_bytes):
            self._give_up(slot.session_id)
            return
        first = kv.window.first if kv.window is not None else 0
        entry = StoredKV(
            key=next(self._keys),
            session_id=slot.session_id,
            namespace=kv.namespace,
            chain=kv.chain.prefix(kv.committed_len),
            committed_len=kv.committed_len,
            draft_len=kv.draft_len,
            window_first=first,
            num_bytes=num_bytes,
        )
        self._host.add(entry)
        slot.entry = entry
        self._slots.move(slot, SlotState.SAVING)
        self._copy(entry, CopyOrder(CopyKind.SAVE, entry.key, pages))

    def load(self, slot: SessionSlot, kv: SequenceKV) -> None:
        """Fills `kv`, whose pages are allocated, from the host or disk; the slot holds it meanwhile."""
        entry = slot.entry
        assert entry is not None
        assert slot.state is SlotState.STORED
        slot.kv = kv
        self._slots.move(slot, SlotState.LOADING)
        self._copy(entry, CopyOrder(CopyKind.LOAD, entry.key, _pages_of(kv)))

    def take_out(self, slot: SessionSlot) -> SequenceKV:
        """The KV of a slot whose KV is on the device; a save that runs comes to nothing."""
        kv = slot.kv
        assert kv is not None
        assert slot.state in (SlotState.IDLE, SlotState.SAVING)
        slot.kv = None
        self._drop_entry(slot)
        self._slots.move(slot, SlotState.IDLE)
        return kv

    def discard(self, session_id: str) -> None:
        """The slot and its KV go, wherever they are, unless a turn has them. Unknown ids are fine."""
        slot = self._slots.get(session_id)
        if slot is None:
            return
        assert slot.state is not SlotState.LENT
        self.num_changes += 1
        self._slots.remove(session_id)
        if slot.state is SlotState.LOADING:
            assert slot.entry is not None
            assert slot.kv is not None
            self._orphans[slot.entry.key] = slot.kv
        elif slot.kv is not None:
            self._inner.release(slot.kv)
        self._drop_entry(slot)

    def copy_done(self, key: int, *, failed: bool = False) -> None:
        """The runner's answer to a SAVE, SPILL or LOAD. What a SAVE or LOAD failed to copy is computed again from the
        token log."""
        if key in self._copies:
            self._copied(self._copies.pop(key), failed=failed)
        else:
            self._written(failed=failed)
        self._spill()

    def _copied(self, entry: StoredKV, *, failed: bool) -> None:
        """A SAVE or LOAD has ended. Of an unwanted one only its pages are left, if it was a load."""
        self.num_changes += 1
        if failed and entry.on_disk:
            self._disk_failed()
        entry.saved |= not failed
        self._let_go(entry)
        orphan = self._orphans.pop(entry.key, None)
        if orphan is not None:
            self._inner.release(orphan)
        slot = self._slots.get(entry.session_id) if entry.wanted else None
        if slot is None:
            return
        assert slot.kv is not None
        if failed:
            self._lose(slot)
        elif slot.state is SlotState.SAVING:
            self._inner.release(slot.kv)
            slot.kv = None
            self._slots.move(slot, SlotState.STORED)
            self.num_to_host += 1
        else:
            slot.kv.commit(entry.committed_len, entry.draft_len)
            slot.kv.chain = entry.chain
            self._drop_entry(slot)
            self._slots.move(slot, SlotState.IDLE)
            self.num_from_disk += entry.on_disk
            self.num_from_host += not entry.on_disk

    def _written(self, *, failed: bool) -> None:
        """The SPILL has ended. It comes to nothing if it failed, or the session is gone, or on its way back to the
        device: what the host has stays there."""
        assert self._write is not None
        (source, entry), self._write = self._write, None
        entry.saved = not failed
        self._let_go(source)
        self._let_go(entry)
        if failed:
            self._disk_failed()
        else:
            self._disk_pause.succeeded()
        slot = self._slots.get(source.session_id) if source.wanted else None
        if failed or slot is None or slot.state is not SlotState.STORED:
            self._drop(entry)
            return
        self._drop_entry(slot)
        slot.entry = entry
        self.num_to_disk += 1

    def _disk_failed(self) -> None:
        self.num_disk_failures += 1
        self._disk_pause.failed()

    def _lose(self, slot: SessionSlot) -> None:
        """A copy failed: the token log has the session."""
        if slot.kv is not None:
            self._inner.release(slot.kv)
        self._drop_entry(slot)
        self._slots.remove(slot.session_id)
        self.num_to_log += 1

    def _make_room(self, tier: Tier, num_bytes: int) -> bool:
        """Sessions longest there go, unless their turns wait. False, and none went, if that is not enough."""
        missing = tier.missing_bytes(num_bytes)
        victims: list[str] = []
        for entry in tier.settled():
            if missing <= 0:
                break
            if not self._slots.is_expected(entry.session_id):
                victims.append(entry.session_id)
                missing -= entry.num_bytes
        if missing > 0:
            return False
        for session_id in victims:
            self._give_up(session_id)
        return True

    def _give_up(self, session_id: str) -> None:
        """There is no room for an idle session's KV: the token log has the session."""
        slot = self._slots.get(session_id)
        assert slot is not None
        num_pages = pages_for(slot.usable_len, self._inner.page_size)
        self.discard(session_id)
        self.lost.drop(session_id, num_pages)
        self.num_to_log += 1

    def _spill(self) -> None:
        """Has the session longest on the host written to disk, unless the spare part of the host's budget is free or
        will be. One at a time: the next may be wanted, or gone, by then. None while the disk is left alone."""
        if self._write is not None or not self._disk.budget_bytes or self._disk_pause.under_way:
            return
        missing = self._host.missing_bytes(self._spare_bytes)
        missing -= sum(
            entry.num_bytes for entry in self._copies.values() if entry.saved and not entry.on_disk
        )
        if missing <= 0:
            return
        waiting = self._slots.is_expected
        source = next((entry for entry in self._host.settled() if not waiting(entry.session_id)), None)
        if source is None or not self._make_room(self._disk, source.num_bytes):
            return
        entry = replace(source, key=next(self._keys), on_disk=True, saved=False)
        self._disk.add(entry)
        source.copies += 1
        entry.copies += 1
        self._write = source, entry
        self._orders.append(CopyOrder(CopyKind.SPILL, entry.key, source=source.key))

    def _copy(self, entry: StoredKV, order: CopyOrder) -> None:
        entry.copies += 1
        self._copies[entry.key] = entry
        self._orders.append(order)

    def _drop_entry(self, slot: SessionSlot) -> None:
        entry, slot.entry = slot.entry, None
        if entry is not None:
            self._drop(entry)

    def _drop(self, entry: StoredKV) -> None:
        """Nobody wants it: it goes now, or with the last copy that works on it."""
        entry.wanted = False
        if entry.copies:
            return
        (self._disk if entry.on_disk else self._host).remove(entry.key)
        if entry.saved:  # a copy that failed left nothing
            self._orders.append(CopyOrder(CopyKind.DROP, entry.key))

    def _let_go(self, entry: StoredKV) -> None:
        """A copy has ended."""
        entry.copies -= 1
        if not entry.wanted:
            self._drop(entry)


def _pages_of(kv: SequenceKV) -> PoolPages:
    """All pages of an idle sequence, as they are now."""
    full = kv.pages.copy()
    return PoolPages(full, kv.window.live() if kv.window is not None else full[:0])


def _page_at(kv: SequenceKV, index: int) -> PoolPages:
    full = kv.pages[index : index + 1].copy()
    window = kv.window.pages[index : index + 1].copy() if kv.window is not None else full[:0]
    return PoolPages(full, window)
