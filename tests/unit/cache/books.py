"""A small pool of KV books, and sequences filled by hand the way a turn fills them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cache.pages import PageAllocator
from cache.prefix_cache import RadixPrefixCache, token_array
from cache.radix_tree import TokenArray
from cache.sequence_kv import SequenceKV
from cache.session_cache import CacheMatch, SessionAwareCache

PAGE_SIZES = (1, 16, 256)


def tokens_from(first: int, count: int) -> TokenArray:
    """`count` ascending tokens: a prefix of any longer call with the same `first`, and of no other."""
    return token_array(np.arange(first, first + count))


def joined(*parts: Iterable[int]) -> TokenArray:
    return token_array([int(token) for part in parts for token in part])


@dataclass
class Books:
    """One pool: allocator, shared prefixes, session slots. `check` walks every page."""

    allocator: PageAllocator
    prefixes: RadixPrefixCache
    sessions: SessionAwareCache
    page_size: int

    @classmethod
    def make(cls, page_size: int = 4, num_pages: int = 32, *, shared: bool = True) -> Books:
        allocator = PageAllocator(num_pages)
        prefixes = RadixPrefixCache(allocator, page_size, enabled=shared)
        return cls(allocator, prefixes, SessionAwareCache(prefixes), page_size)

    def check(self) -> None:
        self.sessions.check(deep=True)

    def match(
        self, session_id: str | None, tokens: TokenArray, max_len: int | None = None, namespace: str = ""
    ) -> CacheMatch:
        limit = len(tokens) - 1 if max_len is None else max_len
        return self.sessions.match_prefix(session_id, namespace, lambda: tokens, limit, len(tokens))

    def begin(
        self, session_id: str | None, tokens: TokenArray, max_len: int | None = None, namespace: str = ""
    ) -> SequenceKV:
        return self.sessions.begin(self.match(session_id, tokens, max_len, namespace), "r")

    def fill(self, kv: SequenceKV, length: int) -> None:
        """Allocates and "computes" KV up to `length` tokens."""
        assert self.sessions.extend(kv, length)
        kv.committed_len = length
        self.check()

    def run_turn(
        self, session_id: str, tokens: TokenArray, *, share: bool = False, namespace: str = ""
    ) -> SequenceKV:
        """A whole turn over `tokens`, the last of which, as always, has no KV yet. Returns the parked KV."""
        kv = self.begin(session_id, tokens, namespace=namespace)
        self.fill(kv, len(tokens) - 1)
        if share:
            self.sessions.cache_unfinished(kv, tokens)
            self.check()
        self.sessions.finish_turn(session_id, kv, len(tokens))
        self.check()
        return kv

    def run_plain(self, tokens: TokenArray, *, namespace: str = "") -> None:
        """A whole request without a session; it leaves its whole pages in the tree."""
        kv = self.begin(None, tokens, namespace=namespace)
        self.fill(kv, len(tokens))
        self.sessions.finish(kv, tokens)
        self.check()

    def assert_empty(self) -> None:
        """Every page is free again and no lock is left."""
        self.sessions.flush()
        self.check()
        accounts = self.sessions.accounts()
        assert accounts.free == accounts.total, accounts
