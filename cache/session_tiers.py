"""SessionTiers: moves idle sessions' KV from the device to the host, on to disk, back, or drops it (the session log
remains)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

from cache.audit import TierAccounts
from cache.disk_pause import DiskPause
from cache.disk_reads import DiskReads
from cache.lost_kv import LostKV
from cache.pages import PageCounts
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import SequenceKV, pages_for
from cache.slots import SessionSlot, SlotState, SlotTable
from cache.tiers import CopyKind, CopyOrder, PoolPages, StoredKV, Tier, TierSizes

SPARE_PART = 4
"""With a disk, one part in this many of the host's budget is kept free."""


class SessionTiers:
    """Owns the copies in flight and the orders not yet handed to the runner. `slots` are the cache's. `clock` returns
    monotonic seconds.

    Nothing ever waits for room on the host or disk: KV that finds none is dropped at once. So the sessions that have
    been on the host longest are written to disk before others need their room. A copy that is no longer wanted runs to
    its end; what it holds is given back then. That is so for reads from a disk that hangs, too: their pages stay taken,
    but nobody waits for them.
    """

    def __init__(
        self, inner: PrefixCache, slots: SlotTable, sizes: TierSizes, clock: Callable[[], float]
    ) -> None:
        self.lost = LostKV(clock)
        self._inner = inner
        self._slots = slots
        self._sizes = sizes
        self._host = Tier("host", sizes.host_bytes)
        self._disk = Tier("disk", sizes.disk_bytes)
        self._spare_bytes = sizes.host_bytes // SPARE_PART
        self._disk_pause = DiskPause(clock)
        self.reads = DiskReads(clock)
        self._keys = count(1)
        self._copies: dict[int, StoredKV] = {}
        self._write: tuple[StoredKV, StoredKV] | None = None
        """The host's entry and the disk's. Nothing waits for it."""
        self._write_is_due = False  # one was put off by the disk's pause
        self._orphans: dict[int, SequenceKV] = {}  # KV being loaded for a session that is gone
        self._orders: list[CopyOrder] = []
        self.num_changes = 0  # copies to or from the device that ended, sessions whose KV was dropped
        self.num_to_host = 0
        self.num_to_disk = 0
        self.num_to_log = 0
        self.num_from_host = 0
        self.num_from_disk = 0
        self.num_disk_failures = 0

    @property
    def awaits_copies(self) -> bool:
        """Whether copies are in flight that fill device pages, or after which device pages are freed, and that will
        end: reads from a disk that hangs may not."""
        return len(self._copies) > (self.reads.count if self.reads.hangs else 0)

    @property
    def will_free(self) -> bool:
        """Whether pages are free when a copy between device and host ends. Of reads from disk, which may take long,
        nothing is expected."""
        return any(
            not entry.on_disk and (key in self._orphans or self._is_saved(entry))
            for key, entry in self._copies.items()
        )

    @property
    def orphans(self) -> Iterator[SequenceKV]:
        return iter(self._orphans.values())

    def accounts(self) -> tuple[TierAccounts, TierAccounts]:
        """The host's and the disk's accounts. KV being written to disk is in both."""
        return self._host.accounts(), self._disk.accounts()

    def mismatches(self) -> list[str]:
        """What a recount of both budgets finds wrong, and entries that no slot owns."""
        held = {slot.entry.key for slot in self._slots if slot.entry is not None}
        stray = [
            f"{entry.num_bytes} bytes of session {entry.session_id} are stored for nobody"
            for tier in (self._host, self._disk)
            for entry in tier.settled()
            if entry.key not in held
        ]
        return [*self._host.mismatches(), *self._disk.mismatches(), *stray]

    def moving_pages(self, state: SlotState) -> PageCounts:
        """Private pages of sessions being saved (the pages will be free), or being loaded (with what is read from disk
        for nobody)."""
        full = window = 0
        for key, entry in self._copies.items():
            slot = self._slot_of(entry)
            kv = slot.kv if slot is not None and slot.state is state else None
            if kv is None and entry.on_disk and state is SlotState.LOADING:
                kv = self._orphans.get(key)
            if kv is not None:
                full += kv.num_private_pages
                window += kv.num_private_window_pages
        return PageCounts(full, window)

    def take_orders(self) -> list[CopyOrder]:
        """Orders since the last call. The runner must carry them out in sequence, before the next step. A write that
        the disk's pause has put off is ordered once the pause is over."""
        if self._write_is_due:
            self._spill()
        orders, self._orders = self._orders, []
        return orders

    def clone_page(self, source: SequenceKV, target: SequenceKV, index: int) -> None:
        """Orders that page `index` of the source is copied to that of the target."""
        self._orders.append(CopyOrder(CopyKind.CLONE, 0, _page_at(source, index), _page_at(target, index)))

    def demote(self, slot: SessionSlot) -> None:
        """An idle session's pages are needed: its KV goes to the host, or is dropped if there is no room."""
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
        """Fills `kv`, whose pages are allocated, from the host or disk. The slot holds it meanwhile."""
        entry = slot.entry
        assert entry is not None
        assert slot.state is SlotState.STORED
        slot.kv = kv
        self._slots.move(slot, SlotState.LOADING)
        self._copy(entry, CopyOrder(CopyKind.LOAD, entry.key, _pages_of(kv)))

    def give_up_reads(self) -> bool:
        """If the disk hangs, drops the KV that is being read from it: its turns compute it. Returns whether there was
        any. To be called before each step."""
        if not self.reads.look():
            return False
        late = [entry.session_id for entry in self._copies.values() if entry.on_disk and entry.wanted]
        for session_id in late:
            self._disk_failed()
            self.discard(session_id)
            self.num_to_log += 1
        return bool(late)

    def is_out_of_reach(self, slot: SessionSlot) -> bool:
        """Whether the slot's KV is only on a disk that hangs."""
        return (
            slot.state is SlotState.STORED
            and slot.entry is not None
            and slot.entry.on_disk
            and self.reads.hangs
        )

    def restorable_len(self, slot: SessionSlot, length: int) -> int:
        """How many of its first `length` tokens stored KV, or KV being loaded, keeps if a turn continues from them: 0
        if the window pages are gone."""
        assert slot.entry is not None
        return self._inner.restorable_len(slot.entry.window_first, length)

    def cut_stored(self, slot: SessionSlot, length: int) -> None:
        """Cuts stored KV, or KV being loaded, to `length` tokens. It is dropped if no turn can continue from there."""
        assert slot.entry is not None
        if self.restorable_len(slot, length) == 0:
            self.discard(slot.session_id)
        else:
            slot.entry.chain.cut(length)  # the turn that takes the KV cuts the KV itself

    def take_out(self, slot: SessionSlot) -> SequenceKV:
        """Takes the KV out of a slot whose KV is on the device. A save in flight is discarded."""
        kv = slot.kv
        assert kv is not None
        assert slot.state in (SlotState.IDLE, SlotState.SAVING)
        slot.kv = None
        self._drop_entry(slot)
        self._slots.move(slot, SlotState.IDLE)
        return kv

    def discard(self, session_id: str) -> None:
        """Drops the slot and its KV, in whatever tier. No turn may have the KV. Unknown ids are fine."""
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

    def copy_done(self, key: int, *, failed: bool = False, disk_full: bool = False) -> None:
        """Takes the runner's answer to a SAVE, SPILL or LOAD. KV that a SAVE or LOAD failed to copy is computed again
        from the session log. `disk_full`: it failed since the disk had no space left."""
        if key in self._copies:
            self._copied(self._copies.pop(key), failed=failed)
        else:
            self._written(failed=failed, disk_full=disk_full)
        self._spill()

    def _copied(self, entry: StoredKV, *, failed: bool) -> None:
        """A SAVE or LOAD has ended. If a LOAD is no longer wanted, its pages are freed."""
        self.num_changes += 1
        if entry.on_disk:
            self.reads.ended()
        if failed and entry.on_disk:
            self._disk_failed()
        entry.saved |= not failed
        self._let_go(entry)
        orphan = self._orphans.pop(entry.key, None)
        if orphan is not None:
            self._inner.release(orphan)
        slot = self._slot_of(entry)
        if slot is None:
            return
        assert slot.kv is not None
        if failed:  # the session log still has the session
            self._inner.release(slot.kv)
            self._drop_entry(slot)
            self._slots.remove(slot.session_id)
            self.num_to_log += 1
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

    def _written(self, *, failed: bool, disk_full: bool) -> None:
        """The SPILL has ended. Its result is dropped if it failed, or if the session is gone or on its way back to the
        device. The host's copy is then kept as it is. If the disk is full before its budget is, those longest there
        make room for the next try."""
        assert self._write is not None
        (source, entry), self._write = self._write, None
        entry.saved = not failed
        self._let_go(source)
        self._let_go(entry)
        if failed:
            self._disk_failed()
        else:
            self._disk_pause.succeeded()
        slot = self._slot_of(source)
        if failed or slot is None or slot.state is not SlotState.STORED:
            self._drop(entry)
            if disk_full:
                self._give_up_longest(self._disk, entry.num_bytes)
            return
        self._drop_entry(slot)
        slot.entry = entry
        self.num_to_disk += 1

    def _disk_failed(self) -> None:
        self.num_disk_failures += 1
        self._disk_pause.failed()

    def _make_room(self, tier: Tier, num_bytes: int) -> bool:
        """Frees what `num_bytes` more need of the tier's budget. False, and nothing changed, if that cannot be."""
        return self._give_up_longest(tier, tier.missing_bytes(num_bytes))

    def _give_up_longest(self, tier: Tier, missing: int) -> bool:
        """Drops the sessions that have been in the tier longest, unless their turns wait, until `missing` bytes are
        free. False, and none dropped, if that is not enough."""
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
        """Drops an idle session's KV for lack of room. The session log still has the session."""
        slot = self._slots.get(session_id)
        assert slot is not None
        num_pages = pages_for(slot.usable_len, self._inner.page_size)
        self.discard(session_id)
        self.lost.drop(session_id, num_pages)
        self.num_to_log += 1

    def _spill(self) -> None:
        """Starts to write the session that has been on the host longest, of those that the disk could hold, unless the
        spare part of the host's budget is free or will be. One at a time: the next session may be wanted, or gone, by
        then. None is written while the disk is paused; that is made up for by `take_orders`."""
        if self._write is not None or not self._disk.budget_bytes:
            return
        self._write_is_due = self._disk_pause.under_way
        if self._write_is_due:
            return
        missing = self._host.missing_bytes(self._spare_bytes)
        missing -= sum(
            entry.num_bytes for entry in self._copies.values() if entry.saved and not entry.on_disk
        )
        if missing <= 0:
            return
        source = next(filter(self._may_be_written, self._host.settled()), None)
        if source is None or not self._make_room(self._disk, source.num_bytes):
            return
        entry = replace(source, key=next(self._keys), on_disk=True, saved=False)
        self._disk.add(entry)
        source.copies += 1
        entry.copies += 1
        self._write = source, entry
        self._orders.append(CopyOrder(CopyKind.SPILL, entry.key, source=source.key))

    def _may_be_written(self, entry: StoredKV) -> bool:
        return entry.num_bytes <= self._disk.budget_bytes and not self._slots.is_expected(entry.session_id)

    def _copy(self, entry: StoredKV, order: CopyOrder) -> None:
        entry.copies += 1
        self._copies[entry.key] = entry
        if entry.on_disk:
            self.reads.began()
        self._orders.append(order)

    def _slot_of(self, entry: StoredKV) -> SessionSlot | None:
        """The slot whose entry this is. None: it is no longer wanted."""
        return self._slots.get(entry.session_id) if entry.wanted else None

    def _is_saved(self, entry: StoredKV) -> bool:
        """Whether the entry's session is being saved."""
        slot = self._slot_of(entry)
        return slot is not None and slot.state is SlotState.SAVING

    def _drop_entry(self, slot: SessionSlot) -> None:
        entry, slot.entry = slot.entry, None
        if entry is not None:
            self._drop(entry)

    def _drop(self, entry: StoredKV) -> None:
        """The entry is no longer wanted: removes it now, or when the last copy that works on it ends."""
        entry.wanted = False
        if entry.copies:
            return
        (self._disk if entry.on_disk else self._host).remove(entry.key)
        if entry.saved:  # a copy that failed left nothing
            self._orders.append(CopyOrder(CopyKind.DROP, entry.key))

    def _let_go(self, entry: StoredKV) -> None:
        """A copy that worked on the entry has ended."""
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
