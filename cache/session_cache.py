"""SessionAwareCache: keeps each session's KV between turns, over the PrefixCache.

Between turns a session's SequenceKV rests in its slot. A turn *moves* it out to the request and, at its end, back:
it is never in two places, so it can never be counted twice. Idle slots are always demotable: to host memory while its
budget lasts, on to disk, then to nothing but the session log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cache.history import History
from cache.journal import Holder
from cache.kv_census import kv_bytes
from cache.kv_demand import KVDemand
from cache.pages import NO_PAGES, PageCounts
from cache.prefix_cache import PrefixCache, PrefixMatch
from cache.radix_tree import TokenArray
from cache.sequence_kv import PageAccount, SequenceKV, pages_for
from cache.session_audit import SessionAuditor
from cache.session_tiers import SessionTiers
from cache.slots import KVPlace, SessionSlot, SlotState, SlotTable
from cache.tiers import TierSizes
from cache.token_chain import TokenChain, Tokens

EVICTION_SHARE = 64
"""Cached prefixes are evicted by at least a 64th of the pool: drafts take free pages only, and each search for window
pages walks over all nodes of the tree."""


class SessionBorrowed(RuntimeError):
    """The session's KV is out with a turn; the operation needs it in its slot."""


class Room(Enum):
    """The result of a request for pages."""

    READY = auto()
    WAIT = auto()  # copies in flight will free pages
    SHORT = auto()  # only retracting a running request would free pages


@dataclass(frozen=True, slots=True)
class RoomSigns:
    """What must change before a sequence that found no room can find some, unless another sequence ends."""

    num_changes: int  # copies that ended, sessions whose KV was dropped
    free: PageCounts

    def promise_more_than(self, before: RoomSigns) -> bool:
        return self.num_changes != before.num_changes or not self.free.fits_in(before.free)


@dataclass(frozen=True, slots=True)
class CacheMatch:
    """Where a request could start: `prefix_len` tokens of KV are in a slot (`prefix` is None) or in the shared tree.
    `elsewhere`: the slot's KV is on the host or disk; `promote` it first. `loading`: it is on its way to the device."""

    session_id: str | None
    prefix_len: int
    prefix: PrefixMatch | None
    elsewhere: bool = False
    loading: bool = False

    @property
    def from_slot(self) -> bool:
        return self.prefix is None


class SessionAwareCache:
    """The cache as the engine sees it. Lengths in tokens, sizes in pages.

    Requests change it only through its methods. `tiers` is for what carries out its copies (engine/copies.py) and
    reports its counts; `books` and `demand` only read. `step_tokens` is the most that a sequence grows by in one step.
    `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        inner: PrefixCache,
        sizes: TierSizes | None = None,
        step_tokens: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._sizes = sizes or TierSizes()
        self._step_tokens = step_tokens
        self._slots = SlotTable()
        self._account = PageAccount()
        self.tiers = SessionTiers(inner, self._slots, self._sizes, clock)
        self.books = SessionAuditor(inner, self._slots, self._account, self.tiers)
        self.demand = KVDemand(inner, self._slots, self.tiers.lost, self.need)
        self.evicted = NO_PAGES  # cached pages dropped to make room, since the start

    @property
    def page_size(self) -> int:
        return self._inner.page_size

    @property
    def num_pages(self) -> int:
        return self._inner.num_pages

    @property
    def num_sessions(self) -> int:
        return len(self._slots)

    @property
    def awaits_copies(self) -> bool:
        """Whether copies are in flight that will end, and that pages wait for."""
        return self.tiers.awaits_copies

    @property
    def disk_hangs(self) -> bool:
        """Whether pages are lent to reads that may never end, see cache/disk_reads.py."""
        return self.tiers.reads.hangs

    def empty_chain(self, namespace: str) -> TokenChain:
        """The chain of a sequence of this namespace without any token yet. Safe on any thread."""
        return self._inner.identity.chain(namespace, self.page_size)

    def match_prefix(
        self,
        session_id: str | None,
        namespace: str,
        tokens: Callable[[], TokenArray],
        max_len: int,
        history: History,
    ) -> CacheMatch:
        """Finds reusable KV for a request over its first `max_len` tokens (the caller has left out those it needs
        logits of).

        A slot's KV is used only as far as it is KV of the turn's history: the session may have been cut, or continued
        elsewhere, and nothing need have told the cache. If the slot has less, the tree may have more. Changes nothing,
        so a request refused after it can come back. `tokens` is called only if the tree is searched: a session that
        continues costs the same at any length. Raises SessionBorrowed during a turn.
        """
        slot = self._idle_slot(session_id) if session_id is not None else None
        own = None
        if slot is not None:
            own = self._match_slot(slot, namespace, max_len, history)
            if own is not None and own.prefix_len >= min(max_len, history.length, slot.usable_len):
                return own
        prefix = self._inner.match_prefix(namespace, tokens()[: max(max_len, 0)])
        if own is not None and own.prefix_len >= prefix.prefix_len:
            return own
        return CacheMatch(session_id, prefix.prefix_len, prefix)

    def is_loading(self, session_id: str | None) -> bool:
        """Whether the session's KV is on its way to the device."""
        slot = self._slots.get(session_id) if session_id is not None else None
        return slot is not None and slot.state is SlotState.LOADING

    def room_signs(self) -> RoomSigns:
        return RoomSigns(self.tiers.num_changes, self._inner.free)

    def need(self, more: Sequence[int]) -> PageCounts:
        """The most that sequences take of each pool for so many `more` pages each. A sequence never has more window
        pages than are live at once."""
        pool = self._inner.window
        if pool is None:
            return PageCounts(sum(more))
        most = pool.pages_for_span(self._step_tokens)
        return PageCounts(sum(more), sum(min(num_pages, most) for num_pages in more))

    def can_begin(self, match: CacheMatch, target_len: int, reserve: PageCounts = NO_PAGES) -> bool:
        """Whether there are pages for `target_len` tokens on this match, and `reserve` besides, without a
        retraction."""
        held = 0 if match.elsewhere else pages_for(match.prefix_len, self.page_size)
        num_pages = pages_for(target_len, self.page_size) - held
        own = self._slots.get(match.session_id) if match.session_id is not None else None
        own_kv = own.kv if own is not None else None
        kept_len = match.prefix_len if match.from_slot else 0
        if match.elsewhere and own is not None and own.entry is not None:
            # KV that was rewound while it was stored is fetched with the rest.
            num_pages = max(num_pages, pages_for(own.entry.committed_len, self.page_size))
        needed = self.need([num_pages]) + reserve
        room = self._inner.room_beside(match.prefix)
        if needed.fits_in(room):
            return True
        # Demoting idle sessions frees their private pages, and the shared pages that no sequence in flight holds.
        # Counting more pages would demote all sessions in vain.
        room += self._account.counts - self.tiers.moving_pages(SlotState.LOADING)
        if own is not None and own_kv is not None and own.state is not SlotState.LOADING:
            # The private pages that it keeps are not freed; those past the match are, when it begins.
            kept = max(0, pages_for(kept_len, self.page_size) - own_kv.num_protected_pages)
            room -= PageCounts(kept, own_kv.num_private_window_pages)
        missing = needed - room
        return missing.fits_in(NO_PAGES) or missing.fits_in(
            self._inner.yielding_pages(match.prefix, own_kv, kept_len)
        )

    def begin(self, match: CacheMatch, holder: Holder) -> SequenceKV:
        """Moves the matched KV to a request. A session's KV past the prefix is freed first."""
        assert not match.elsewhere
        assert not match.loading
        session_id = match.session_id
        if match.prefix is not None:
            kv = self._inner.begin(match.prefix, holder)
            if session_id is not None:
                self.tiers.discard(session_id)  # what it holds, if anything, could not be continued
                self.tiers.lost.begin(session_id)
        else:
            assert session_id is not None
            slot = self._slots.get(session_id)
            assert slot is not None
            kv = self.tiers.take_out(slot)
            kv.holder = holder
            self._inner.lend(kv)
            self._free_tail(kv, match.prefix_len)
        if session_id is not None:
            self._slots.put(SessionSlot(session_id, SlotState.LENT, borrower=holder.request_id))
        return kv

    def promote(self, session_id: str, ahead: PageCounts = NO_PAGES) -> Room:
        """Starts to bring a session's KV from the host or disk, beside compute; READY once that is under way.

        Room comes from cached prefixes and from sessions that are needed later than this one. `ahead` is promised to
        turns that come before its own.
        """
        slot = self._slots.get(session_id)
        if slot is None or slot.state is not SlotState.STORED:
            return Room.READY
        entry = slot.entry
        assert entry is not None
        num_pages = pages_for(entry.committed_len, self.page_size)
        wanted = self._inner.counts(num_pages, num_pages - entry.window_first)
        room = self._make_room(wanted + ahead, session_id)
        if room is Room.READY:
            holder = Holder(session_id)
            kv = self._inner.restore(entry.namespace, holder, entry.committed_len, entry.window_first)
            self._inner.reclaim(kv, self._account)
            self.tiers.load(slot, kv)
        return room

    def extend(self, kv: SequenceKV, target_len: int, before: str | None = None) -> Room:
        """Adds pages for `target_len` tokens. If it must, it evicts cached prefixes, then demotes idle sessions.

        That is not undone if room stays short. `before` names this turn's session: sessions whose turns are ahead of it
        are spared.
        """
        if self._inner.extend(kv, target_len):
            return Room.READY
        num_pages = kv.pages_missing(target_len)
        room = self._make_room(self._inner.counts(num_pages, num_pages), before)
        if room is Room.READY:
            extended = self._inner.extend(kv, target_len)
            assert extended
        return room

    def extend_if_free(self, kv: SequenceKV, target_len: int) -> bool:
        """Adds pages only if they are free."""
        return self._inner.extend(kv, target_len)

    @property
    def slides(self) -> bool:
        """Whether there is a window pool, whose pages `slide` frees."""
        return self._inner.window is not None

    def slide(self, kv: SequenceKV, keep_len: int) -> None:
        """After a step: frees window pages that no query will see; a rollback to `keep_len` stays possible."""
        self._inner.slide(kv, keep_len)

    def cache_unfinished(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """Shares a computed prompt with later requests; its request goes on."""
        self._inner.cache_unfinished(kv, tokens)

    def finish(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """A request without session ended well: its KV stays as a shared prefix, evictable."""
        self._inner.shrink(kv, len(tokens))
        self._inner.cache_finished(kv, tokens)

    def finish_turn(self, session_id: str, kv: SequenceKV, tokens: Tokens) -> None:
        """A turn ended well with these tokens (input plus finished output): their KV moves to the slot."""
        self._trim_overshoot(kv, len(tokens))
        self._inner.slide(kv, 0)
        self._park(session_id, kv, tokens)

    def give_back(self, kv: SequenceKV, session_id: str | None, tokens: Tokens, history_len: int) -> None:
        """A request that was aborted or retracted gives up its KV. What its session had committed, the first
        `history_len` of `tokens`, stays: their KV moves back to the slot."""
        if session_id is None:
            self._inner.release(kv)
        else:
            self._inner.shrink(kv, history_len)
            self._park(session_id, kv, tokens)

    def rewind_session(self, session_id: str, length: int) -> None:
        """Cuts an idle session's KV to at most `length` tokens. Raises SessionBorrowed during a turn."""
        slot = self._idle_slot(session_id)
        if slot is None:
            return
        if length == 0:
            self.tiers.discard(session_id)
        elif slot.state in (SlotState.STORED, SlotState.LOADING):
            self.tiers.cut_stored(slot, length)
        elif slot.kv is not None and length < slot.kv.allocated_len:
            slot.kv = self.tiers.take_out(slot)
            self._inner.shrink(slot.kv, length)
            if slot.kv.committed_len == 0:
                self.tiers.discard(session_id)

    def fork_session(self, parent_id: str, child_id: str, tokens: TokenArray, history: History) -> int:
        """Starts `child_id` on the KV of an idle parent's first `tokens`; returns how many of them it covers.

        `tokens` are those of `history`. The parent's KV is used as far as it is KV of this history.

        Whole pages are shared through the prefix tree, each holder with its own lock; a partly filled page is copied. A
        parent whose KV is on the host or disk gives none: the child computes its own. Raises SessionBorrowed during a
        turn of either.
        """
        self.release_session(child_id)
        slot = self._idle_slot(parent_id)
        if slot is None or slot.kv is None or slot.state is SlotState.LOADING:
            return 0
        length = history.agreed_len(slot.kv.chain)
        if length == 0:
            return 0
        slot.kv = self.tiers.take_out(slot)  # sharing may free duplicates: a save must not go on reading them
        child = self._inner.begin(self._inner.share(slot.kv, tokens[:length]), Holder(child_id))
        if 0 < length - child.committed_len < self.page_size:
            self._copy_part_page(slot.kv, child, length)
        if child.committed_len == 0:
            self._inner.release(child)
            return 0
        child.name(tokens)
        self._inner.reclaim(child, self._account)
        self._slots.put(SessionSlot(child_id, SlotState.IDLE, child))
        return child.committed_len

    def release_session(self, session_id: str) -> None:
        """Frees an idle session's KV and forgets it. Raises SessionBorrowed during a turn; unknown ids are fine."""
        self._idle_slot(session_id)
        self.tiers.discard(session_id)
        self.tiers.lost.forget(session_id)

    def expect(self, session_id: str, place: tuple[int, int]) -> None:
        """The session's next turn waits at this place in the queue. Idle sessions without a waiting turn give way
        first."""
        self._slots.expect(session_id, place)

    def unexpect(self, session_id: str) -> None:
        """The session's turn no longer waits."""
        self._slots.unexpect(session_id)

    def flush(self) -> None:
        """Drops every cached prefix that no session or request holds."""
        self._inner.evict(self._inner.cached_pages)

    def kv_bytes(self, in_turn: Iterable[SequenceKV]) -> dict[tuple[str, str], int]:
        """Bytes of sessions and of running requests, by namespace and tier, see cache/kv_census.py."""
        return kv_bytes(self._slots, in_turn, self._sizes)

    def session_ids(self) -> frozenset[str]:
        """All sessions that have a slot."""
        return frozenset(slot.session_id for slot in self._slots)

    def held_tokens(self) -> dict[str, int]:
        """Tokens of KV that each idle session holds, in whatever tier."""
        return {slot.session_id: slot.usable_len for slot in self._slots if slot.state is not SlotState.LENT}

    def places(self, session_ids: Iterable[str]) -> dict[str, KVPlace]:
        """Where the KV of these sessions is. Sessions without a slot are left out."""
        slots = map(self._slots.get, session_ids)
        return {slot.session_id: slot.place for slot in slots if slot is not None}

    def _match_slot(
        self, slot: SessionSlot, namespace: str, max_len: int, history: History
    ) -> CacheMatch | None:
        """What a turn can reuse of its session's slot. None: nothing."""
        contents = slot.contents
        assert contents is not None
        if contents.namespace != namespace or self.tiers.is_out_of_reach(slot):
            return None
        usable = min(history.agreed_len(contents.chain), max_len)
        if slot.state in (SlotState.STORED, SlotState.LOADING):
            loading = slot.state is SlotState.LOADING
            usable = self.tiers.restorable_len(slot, usable)
            match = CacheMatch(slot.session_id, usable, None, elsewhere=not loading, loading=loading)
        else:
            assert slot.kv is not None
            match = CacheMatch(slot.session_id, self._inner.resumable_len(slot.kv, usable), None)
        return match if match.prefix_len > 0 else None

    def _free_tail(self, kv: SequenceKV, prefix_len: int) -> None:
        """Frees every page wholly past `prefix_len` before a turn extends there.

        Otherwise the turn would overwrite the page-table entries of pages that could then never be freed. Usually there
        are none. They come from speculation past what was accepted, from a retracted turn that resumes one token short,
        or from input log-probabilities for which the last token is computed again.
        """
        self._inner.shrink(kv, prefix_len)

    def _trim_overshoot(self, kv: SequenceKV, target_len: int) -> None:
        """Cuts every length to `target_len` at a turn's end, so that the next turn's tokens and KV agree."""
        self._inner.shrink(kv, target_len)

    def _park(self, session_id: str, kv: SequenceKV, tokens: Tokens) -> None:
        """Moves KV from its request to the slot. A slot without KV is dropped; the log still has the session."""
        slot = self._slots.get(session_id)
        assert slot is not None
        assert slot.state is SlotState.LENT
        if kv.committed_len == 0:
            self._inner.release(kv)
            self._slots.remove(session_id)
            return
        self._inner.shrink(kv, kv.committed_len)  # an idle session holds no page without KV
        kv.name(tokens)
        self._inner.reclaim(kv, self._account)
        self._slots.put(SessionSlot(session_id, SlotState.IDLE, kv))

    def _copy_part_page(self, parent: SequenceKV, child: SequenceKV, length: int) -> None:
        """Gives the child its own copy of the page that `length` ends in, if a page is free for it."""
        index = length // self.page_size
        if parent.window is not None and not parent.window.is_live(index, index + 1):
            return
        if not self._inner.extend(child, length):
            return
        child.commit(length, min(parent.draft_len, length))
        self.tiers.clone_page(parent, child, index)

    def _make_room(self, wanted: PageCounts, before: str | None) -> Room:
        """Evicts cached prefixes, then demotes idle sessions, until the `wanted` pages are free."""
        while True:
            missing = wanted - self._inner.free
            if missing.fits_in(NO_PAGES):
                return Room.READY
            if self._evict(missing):
                continue
            if not missing.fits_in(self.tiers.moving_pages(SlotState.SAVING)):
                victim = self._slots.next_victim(before)
                if victim is not None:
                    self.tiers.demote(victim)
                    continue
            return Room.WAIT if self.tiers.will_free else Room.SHORT

    def _evict(self, missing: PageCounts) -> bool:
        """Evicts cached prefixes for the pages that are missing. False: that freed none."""
        pool, evicted = self._inner.window, NO_PAGES
        if missing.full > 0 and self._inner.cached_pages:
            evicted = self._inner.evict(max(missing.full, self.num_pages // EVICTION_SHARE))
        missing_window = missing.window - evicted.window
        if pool is not None and missing_window > 0 and pool.cached_pages:
            num_pages = max(missing_window, pool.num_pages // EVICTION_SHARE)
            evicted += PageCounts(0, self._inner.evict_window(num_pages))
        if evicted == NO_PAGES:
            return False
        self.evicted += evicted
        return True

    def _idle_slot(self, session_id: str) -> SessionSlot | None:
        slot = self._slots.get(session_id)
        if slot is not None and slot.state is SlotState.LENT:
            raise SessionBorrowed(f"session {session_id} is in a turn of request {slot.borrower}")
        return slot
