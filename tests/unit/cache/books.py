"""A small pool of KV books. Tests fill its sequences by hand in the way that a turn fills them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cache.audit import PageAccounts, TierAccounts
from cache.history import History
from cache.journal import Holder
from cache.pages import PageAllocator
from cache.prefix_cache import PrefixCache, token_array
from cache.radix_tree import TokenArray
from cache.sequence_kv import SequenceKV
from cache.session_cache import CacheMatch, Room, SessionAwareCache
from cache.session_tiers import SessionTiers
from cache.slots import SessionSlot
from cache.tiers import CopyKind, CopyOrder, TierSizes
from cache.token_chain import ANY_KV, TokenChain
from cache.window import WindowPool
from tests.unit.controllers.manual_clock import ManualClock

PAGE_SIZES = (1, 16, 256)
PAGE_BYTES = 100
WINDOW_PAGE_BYTES = 10


def tokens_from(first: int, count: int) -> TokenArray:
    """`count` ascending tokens from `first` on: a prefix of every longer call with the same `first`, and of no other
    call."""
    return token_array(np.arange(first, first + count))


def joined(*parts: Iterable[int]) -> TokenArray:
    return token_array([int(token) for part in parts for token in part])


def no_chain(page_size: int) -> TokenChain:
    """The token chain of a sequence without tokens."""
    return ANY_KV.chain("", page_size)


@dataclass
class Books:
    """The pools, shared prefixes and session slots. `check` walks every page, lock and byte."""

    allocator: PageAllocator
    prefixes: PrefixCache
    sessions: SessionAwareCache
    page_size: int
    clock: ManualClock

    @classmethod
    def make(
        cls,
        page_size: int = 4,
        num_pages: int = 32,
        *,
        shared: bool = True,
        window_len: int | None = None,
        num_window_pages: int | None = None,
        host_pages: int = 0,
        disk_pages: int = 0,
        step_tokens: int = 16,
    ) -> Books:
        """`host_pages` and `disk_pages` say how many pages of the full pool the host and the disk have room for."""
        allocator = PageAllocator(num_pages)
        window = None
        if window_len is not None:
            window = WindowPool(PageAllocator(num_window_pages or num_pages), page_size, window_len)
        prefixes = PrefixCache(allocator, page_size, enabled=shared, window=window)
        sizes = TierSizes(host_pages * PAGE_BYTES, disk_pages * PAGE_BYTES, PAGE_BYTES, WINDOW_PAGE_BYTES)
        clock = ManualClock()
        sessions = SessionAwareCache(prefixes, sizes, step_tokens, clock)
        return cls(allocator, prefixes, sessions, page_size, clock)

    @property
    def tiers(self) -> SessionTiers:
        return self.sessions.tiers

    @property
    def window(self) -> WindowPool:
        assert self.prefixes.window is not None
        return self.prefixes.window

    def accounts(self) -> PageAccounts:
        return self.sessions.books.accounts()

    def window_accounts(self) -> PageAccounts:
        accounts = self.sessions.books.window_accounts()
        assert accounts is not None
        return accounts

    def check(self) -> None:
        self.sessions.books.check("strict")

    def slot(self, session_id: str) -> SessionSlot:
        slot = self.sessions._slots.get(session_id)
        assert slot is not None
        return slot

    def slot_kv(self, session_id: str) -> SequenceKV:
        kv = self.slot(session_id).kv
        assert kv is not None
        return kv

    def match(
        self, session_id: str | None, tokens: TokenArray, max_len: int | None = None, namespace: str = ""
    ) -> CacheMatch:
        """Matches `tokens`, all of which are the session's history."""
        limit = len(tokens) - 1 if max_len is None else max_len
        history = History(tokens.tolist(), len(tokens))
        return self.sessions.match_prefix(session_id, namespace, lambda: tokens, limit, history)

    def fork(self, parent_id: str, child_id: str, tokens: TokenArray) -> int:
        """Forks `child_id` at the end of `tokens`, which are the parent's history."""
        history = History(tokens.tolist(), len(tokens))
        return self.sessions.fork_session(parent_id, child_id, tokens, history)

    def begin(
        self, session_id: str | None, tokens: TokenArray, max_len: int | None = None, namespace: str = ""
    ) -> SequenceKV:
        match = self.match(session_id, tokens, max_len, namespace)
        return self.sessions.begin(match, Holder(session_id, "r"))

    def fill(self, kv: SequenceKV, length: int, *, keep_len: int | None = None) -> None:
        """Allocates and "computes" KV up to `length` tokens; with `keep_len`, window pages slide."""
        assert self.sessions.extend(kv, length) is Room.READY
        kv.commit(length, None)
        if keep_len is not None:
            self.sessions.slide(kv, keep_len)
        self.check()

    def run_turn(
        self, session_id: str, tokens: TokenArray, *, share: bool = False, namespace: str = ""
    ) -> SequenceKV:
        """Runs a whole turn over `tokens`. As always, the last token has no KV yet. Returns the parked KV."""
        kv = self.begin(session_id, tokens, namespace=namespace)
        self.fill(kv, len(tokens) - 1)
        if share:
            self.sessions.cache_unfinished(kv, tokens)
            self.check()
        self.sessions.finish_turn(session_id, kv, tokens)
        self.check()
        return kv

    def run_plain(self, tokens: TokenArray, *, namespace: str = "") -> None:
        """Runs a whole request without a session. Its full pages stay in the tree."""
        kv = self.begin(None, tokens, namespace=namespace)
        self.fill(kv, len(tokens))
        self.sessions.finish(kv, tokens)
        self.check()

    @property
    def host(self) -> TierAccounts:
        return self.tiers.accounts()[0]

    @property
    def disk(self) -> TierAccounts:
        return self.tiers.accounts()[1]

    def take_orders(self) -> list[CopyOrder]:
        orders = self.tiers.take_orders()
        self.check()
        return orders

    def end_copies(self, *, failed: bool = False) -> list[CopyKind]:
        """Carries out all copy orders at once. Returns their kinds."""
        orders = self.tiers.take_orders()
        for order in orders:
            if order.kind in (CopyKind.SAVE, CopyKind.SPILL, CopyKind.LOAD):
                self.tiers.copy_done(order.key, failed=failed)
                self.check()
        return [order.kind for order in orders]

    def assert_empty(self) -> None:
        """Checks that every page is free again and that no lock is left."""
        self.sessions.flush()
        self.check()
        accounts = self.accounts()
        assert accounts.free == accounts.total, accounts
        window = self.sessions.books.window_accounts()
        assert window is None or window.free == window.total, window
        assert self.host.used_bytes == self.disk.used_bytes == 0
