"""PrefixCache: shares KV between requests with equal beginnings. Hands out and takes back SequenceKVs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cache.pages import BooksError, PageAllocator, PageArray, no_pages
from cache.radix_tree import RadixTree, TokenArray, TreeMatch
from cache.sequence_kv import SequenceKV, pages_for


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a new sequence could start from. `num_unlocked` pages of it would leave the evictable account."""

    namespace: str
    prefix_len: int
    tree: TreeMatch
    num_unlocked: int


class PrefixCache(Protocol):
    """Owns one pool's allocator, the shared prefixes and the list of sequences in flight. Lengths in tokens.

    A SequenceKV given out by `begin` is in flight until `cache_finished` or `release` takes it back.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    @property
    def cached_pages(self) -> int: ...

    @property
    def protected_pages(self) -> int: ...

    @property
    def in_flight_pages(self) -> int: ...

    def yielding_pages(self, match: PrefixMatch | None, kv: SequenceKV | None) -> int: ...

    def match_prefix(self, namespace: str, tokens: TokenArray) -> PrefixMatch: ...

    def begin(self, match: PrefixMatch) -> SequenceKV: ...

    def extend(self, kv: SequenceKV, target_len: int) -> bool: ...

    def shrink(self, kv: SequenceKV, target_len: int) -> None: ...

    def cache_unfinished(self, kv: SequenceKV, tokens: TokenArray) -> None: ...

    def cache_finished(self, kv: SequenceKV, tokens: TokenArray) -> None: ...

    def release(self, kv: SequenceKV) -> None: ...

    def lend(self, kv: SequenceKV) -> None: ...

    def reclaim(self, kv: SequenceKV) -> None: ...

    def evict(self, num_pages: int) -> int: ...

    def claims(self) -> Iterator[tuple[str, PageArray]]: ...


class RadixPrefixCache:
    """PrefixCache over a RadixTree. With `enabled` False nothing is ever shared."""

    def __init__(self, allocator: PageAllocator, page_size: int, *, enabled: bool = True) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self._allocator = allocator
        self._page_size = page_size
        self._enabled = enabled
        self._tree = RadixTree(page_size)
        self._in_flight: set[SequenceKV] = set()

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def cached_pages(self) -> int:
        return self._tree.cached_pages

    @property
    def protected_pages(self) -> int:
        return self._tree.protected_pages

    @property
    def in_flight_pages(self) -> int:
        return sum(kv.num_private_pages for kv in self._in_flight)

    def yielding_pages(self, match: PrefixMatch | None, kv: SequenceKV | None) -> int:
        """Protected pages that become evictable when every parked sequence but `kv` is released, `match` locked."""
        holders = self._in_flight if kv is None else self._in_flight | {kv}
        held = [
            TreeMatch(holder.protected_len, holder.node, len(holder.node.tokens))
            for holder in holders
            if holder.node is not None
        ]
        if match is not None:
            held.append(match.tree)
        return self._tree.protected_pages - self._tree.locked_pages(held)

    def match_prefix(self, namespace: str, tokens: TokenArray) -> PrefixMatch:
        """Longest cached whole-page prefix. Changes nothing; stale after the next change of the cache."""
        tree = self._tree.match(namespace, tokens) if self._enabled else TreeMatch(0, None, 0)
        return PrefixMatch(namespace, tree.length, tree, self._tree.unlocked_pages(tree))

    def begin(self, match: PrefixMatch) -> SequenceKV:
        """Starts a sequence on a fresh match, locking the shared prefix. The caller owns it."""
        kv = SequenceKV(self._page_size, match.namespace)
        if match.prefix_len:
            kv.node, pages = self._tree.lock(match.tree)
            kv.grow(pages, match.prefix_len)
            kv.committed_len = kv.protected_len = match.prefix_len
        self._in_flight.add(kv)
        return kv

    def extend(self, kv: SequenceKV, target_len: int) -> bool:
        """Adds pages until `target_len` tokens fit. False, and nothing changed, if too few pages are free."""
        missing = kv.pages_missing(target_len)
        pages = self._allocator.allocate(missing, kv.last_page) if missing else no_pages()
        if pages is None:
            return False
        kv.grow(pages, target_len)
        return True

    def shrink(self, kv: SequenceKV, target_len: int) -> None:
        """Cuts to `target_len` tokens and frees what lies wholly past it.

        A cut into the protected prefix gives the tree's pages back first; then only whole protected pages
        survive (a shared page is never written), so `committed_len` may end below `target_len`.
        """
        if target_len < kv.protected_len:
            self._allocator.free(kv.free_aligned(kv.protected_len))
            self._unprotect(kv, target_len - target_len % self._page_size)
        else:
            self._allocator.free(kv.free_aligned(target_len))

    def cache_unfinished(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """Shares the committed whole pages of `tokens`; the sequence goes on, holding them locked."""
        num_tokens = min(len(tokens), kv.committed_len)
        num_tokens -= num_tokens % self._page_size
        if not self._enabled or num_tokens <= kv.protected_len:
            return
        start_page = kv.protected_len // self._page_size
        end_page = num_tokens // self._page_size
        own = kv.pages[:end_page].copy()
        known_len, node = self._tree.insert(kv.namespace, tokens[:num_tokens], own)
        new_node, tree_pages = self._tree.lock(TreeMatch(num_tokens, node, len(node.tokens)))
        if kv.node is not None:
            self._tree.unlock(kv.node)
        kv.node = new_node
        known_page = known_len // self._page_size
        if known_page > start_page:
            # The tree had these tokens already: keep its pages, give up the duplicates.
            kv.replace(start_page, tree_pages[start_page:known_page])
            self._allocator.free(own[start_page:known_page])
        kv.protected_len = num_tokens

    def cache_finished(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """Takes the sequence back, leaving its committed whole pages in the tree, evictable."""
        self.cache_unfinished(kv, tokens)
        self.release(kv)

    def release(self, kv: SequenceKV) -> None:
        """Takes the sequence back: locks returned, private pages freed. `kv` is empty afterwards."""
        self._allocator.free(kv.free_aligned(kv.protected_len))
        self._unprotect(kv, 0)
        self._in_flight.discard(kv)

    def lend(self, kv: SequenceKV) -> None:
        """A parked sequence is in flight again."""
        self._in_flight.add(kv)

    def reclaim(self, kv: SequenceKV) -> None:
        """The holder keeps `kv` parked outside this cache's in-flight account (a session's slot)."""
        self._in_flight.remove(kv)

    def evict(self, num_pages: int) -> int:
        """Frees at least `num_pages` evictable pages if there are so many; returns how many were freed."""
        pages = self._tree.evict(num_pages)
        self._allocator.free(pages)
        return len(pages)

    def claims(self) -> Iterator[tuple[str, PageArray]]:
        """Every page under its account, but for those of parked sequences."""
        yield "free", self._allocator.free_pages()
        yield from self._tree.claims()
        for kv in self._in_flight:
            yield "in_flight", kv.private_pages

    def _unprotect(self, kv: SequenceKV, target_len: int) -> None:
        """Returns the locks past `target_len` (whole pages). Needs private pages to be gone already."""
        if kv.node is None:
            return
        if kv.num_private_pages:
            raise BooksError("protected prefix cut under private pages")
        drop_len = kv.protected_len - target_len
        if target_len:
            kv.node = self._tree.relock_shorter(kv.node, drop_len)
        else:
            self._tree.unlock(kv.node)
            kv.node = None
        kv.protected_len = target_len
        kv.free_aligned(target_len)  # those pages are the tree's: dropped from the table, not freed
        assert kv.num_pages == pages_for(target_len, self._page_size)


def token_array(tokens: object) -> TokenArray:
    """Tokens as the tree wants them."""
    return np.asarray(tokens, dtype=np.int32)
