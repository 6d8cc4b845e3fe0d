"""PrefixCache: shares KV between requests with equal beginnings. Hands out SequenceKVs and takes them back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cache.audit import Claim, PageAccounts
from cache.journal import NOBODY, Holder
from cache.pages import NO_PAGES, BooksError, PageAllocator, PageArray, PageCounts, no_pages
from cache.radix_tree import NO_MATCH, RadixTree, TokenArray, TreeMatch
from cache.sequence_kv import PageAccount, SequenceKV, pages_for
from cache.token_chain import ANY_KV, KVIdentity
from cache.window import WindowPool


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a new sequence could start from. If one does, `evictable` pages of it are not evictable any more."""

    namespace: str
    tree: TreeMatch
    evictable: PageCounts = NO_PAGES

    @property
    def prefix_len(self) -> int:
        return self.tree.length


class PrefixCache:
    """Owns the pools' allocators, the tree of shared prefixes and the list of sequences in flight. Lengths in tokens.

    A SequenceKV given out by `begin` or `restore` is in flight until `cache_finished`, `release` or `reclaim` takes it
    back. Models with sliding windows also have a `window` pool. With `enabled` False requests share nothing; forks
    still do. `identity` is that of the KV in the pools' pages and part of their hashes.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        *,
        enabled: bool = True,
        window: WindowPool | None = None,
        identity: KVIdentity = ANY_KV,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.allocator = allocator
        self.page_size = page_size
        self._enabled = enabled
        self.window = window
        self.identity = identity
        self._tree = RadixTree(page_size)
        self._in_flight: set[SequenceKV] = set()
        self._account = PageAccount()

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages

    @property
    def free(self) -> PageCounts:
        return PageCounts(self.allocator.num_free, 0 if self.window is None else self.window.num_free)

    @property
    def cached_pages(self) -> int:
        return self._tree.cached_pages

    def room_beside(self, match: PrefixMatch | None) -> PageCounts:
        """Pages that are free, or evictable even after a sequence has begun on `match`."""
        full, window = self._tree.cached_pages, 0 if self.window is None else self.window.cached_pages
        room = self.free + PageCounts(full, window)
        return room if match is None else room - match.evictable

    def counts(self, full: int, window: int) -> PageCounts:
        """So many pages of the pools that there are."""
        return PageCounts(full, 0 if self.window is None else window)

    def accounts(self, session: PageAccount) -> PageAccounts:
        """The books of the pool of full-attention layers, from running counters."""
        return PageAccounts(
            total=self.allocator.num_pages,
            free=self.allocator.num_free,
            cached=self._tree.cached_pages,
            protected=self._tree.protected_pages,
            session=session.full,
            in_flight=self._account.full,
        )

    def window_accounts(self, session: PageAccount) -> PageAccounts | None:
        pool = self.window
        if pool is None:
            return None
        return PageAccounts(
            total=pool.num_pages,
            free=pool.num_free,
            cached=pool.cached_pages,
            protected=pool.protected_pages,
            session=session.window,
            in_flight=self._account.window,
        )

    def yielding_pages(self, match: PrefixMatch | None, kv: SequenceKV | None, kept_len: int) -> PageCounts:
        """Protected pages that would become evictable if every parked sequence were released, `kv` cut to `kept_len`
        tokens, and `match` locked."""
        held = [_held_by(holder) for holder in self._in_flight]
        whole_len = 0
        if kv is not None:
            whole_len = min(kept_len, kv.protected_len) // self.page_size * self.page_size
            held.append(self._tree.shorten(_held_by(kv), whole_len))
        if match is not None:
            held.append(match.tree)
        full = self._tree.protected_pages - self._tree.locked_pages(held)
        if self.window is None:
            return PageCounts(full)
        parts = self._shared_window_pages()
        if kv is not None:
            assert kv.window is not None
            parts.append(kv.window.live(0, whole_len // self.page_size))
        if match is not None:
            parts.append(self._tree.match_window(match.tree)[self.window.first_needed(match.prefix_len) :])
        kept = np.unique(np.concatenate(parts))
        return PageCounts(full, self.window.protected_pages - len(kept) + self.window.num_unheld(kept))

    def held_pages(self) -> PageCounts:
        """Pages that sequences in flight hold in each pool; what they share counts once."""
        full = self._account.full + self._tree.locked_pages(map(_held_by, self._in_flight))
        if self.window is None:
            return PageCounts(full)
        shared = np.unique(np.concatenate(self._shared_window_pages()))
        return PageCounts(full, self._account.window + len(shared))

    def match_prefix(self, namespace: str, tokens: TokenArray) -> PrefixMatch:
        """The longest cached whole-page prefix that a sequence can start from. Changes nothing; the result is stale
        after the next change of the cache."""
        if not self._enabled:
            return PrefixMatch(namespace, NO_MATCH)
        return self._match(namespace, tokens)

    def begin(self, match: PrefixMatch, holder: Holder = NOBODY) -> SequenceKV:
        """Starts a sequence on a fresh match, locking the shared prefix. The caller owns it."""
        kv = self._empty(match.namespace, holder)
        if match.prefix_len:
            kv.node, pages = self._tree.lock(match.tree)
            kv.grow(pages, match.prefix_len)
            kv.commit(match.prefix_len, None)
            kv.protect(match.prefix_len)
            if self.window is not None:
                self.window.begin(kv, self._tree.path_window(kv.node))
        self._in_flight.add(kv)
        return kv

    def restore(self, namespace: str, holder: Holder, length: int, window_first: int) -> SequenceKV:
        """A sequence with pages for `length` tokens and no KV in them yet; its first `window_first` window pages are
        gone. As many pages must be free."""
        count = pages_for(length, self.page_size)
        kv = self._empty(namespace, holder)
        if self.window is not None:
            assert kv.window is not None
            kv.window.start_at(window_first, no_pages())
            taken = self.window.take(kv, count - window_first)
            assert taken
        pages = self.allocator.allocate(count, None, holder)
        assert pages is not None
        kv.grow(pages, length)
        self._in_flight.add(kv)
        return kv

    def extend(self, kv: SequenceKV, target_len: int) -> bool:
        """Adds pages in each pool until `target_len` tokens fit. False, and nothing changed, if too few are free."""
        if kv.reach(target_len):
            return True
        missing = kv.pages_missing(target_len)
        if missing > self.allocator.num_free:
            return False
        if self.window is not None and not self.window.take(kv, missing):
            return False
        pages = self.allocator.allocate(missing, kv.last_page, kv.holder)
        assert pages is not None
        kv.grow(pages, target_len)
        return True

    def shrink(self, kv: SequenceKV, target_len: int) -> None:
        """Cuts to `target_len` tokens and frees the pages wholly past it, in each pool.

        A cut into the protected prefix first gives the tree's pages back. Then only whole protected pages survive (a
        shared page is never written), so `committed_len` may end below `target_len`. It ends at 0 if the window pages
        needed to continue from there are gone.
        """
        if target_len < kv.allocated_len:
            self._cut(kv, target_len)
        if self.window is not None and not self.window.resumable(kv, kv.committed_len):
            self._cut(kv, 0)

    def slide(self, kv: SequenceKV, keep_len: int) -> None:
        """Frees window pages that no later query sees, except those that a rollback to `keep_len` would need."""
        if self.window is not None:
            self.window.slide(kv, keep_len)

    def resumable_len(self, kv: SequenceKV, length: int) -> int:
        """How many of its first `length` tokens `kv` keeps if it is cut to them and continues: only whole pages of a
        shared prefix, and 0 if the window pages are gone."""
        if length < kv.protected_len:
            length -= length % self.page_size
        if self.window is None or self.window.resumable(kv, length):
            return length
        return 0

    def restorable_len(self, window_first: int, length: int) -> int:
        """The same for KV that is stored. Its first `window_first` window pages are gone."""
        if self.window is None or window_first <= self.window.first_needed(length):
            return length
        return 0

    def share(self, kv: SequenceKV, tokens: TokenArray) -> PrefixMatch:
        """Puts the whole pages of `tokens` into the tree and returns the match for another sequence to begin on."""
        self._share(kv, tokens)
        return self._match(kv.namespace, tokens)

    def cache_unfinished(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """Shares the committed whole pages of `tokens`; the sequence continues and holds them locked."""
        if self._enabled:
            self._share(kv, tokens)

    def cache_finished(self, kv: SequenceKV, tokens: TokenArray) -> None:
        """Takes the sequence back and leaves its committed whole pages in the tree, evictable."""
        self.cache_unfinished(kv, tokens)
        self.release(kv)

    def release(self, kv: SequenceKV) -> None:
        """Takes the sequence back: locks returned, private pages freed. `kv` is empty afterwards."""
        self._cut(kv, 0)
        self._in_flight.discard(kv)

    def lend(self, kv: SequenceKV) -> None:
        """A parked sequence is in flight again."""
        kv.move_to(self._account)
        self._in_flight.add(kv)

    def reclaim(self, kv: SequenceKV, account: PageAccount) -> None:
        """Parks `kv`: its holder keeps it, and counts it in `account` (that of the sessions' slots)."""
        kv.move_to(account)
        self._in_flight.remove(kv)

    def evict(self, num_pages: int) -> PageCounts:
        """Frees at least `num_pages` evictable pages of the full pool if there are that many; returns how many were
        freed in each pool."""
        pages, window_pages = self._tree.evict(num_pages)
        self.allocator.free(pages, operation="evicted")
        return PageCounts(len(pages), 0 if self.window is None else self.window.disown(window_pages))

    def evict_window(self, num_pages: int) -> int:
        """The same in the window pool; the prefixes keep their pages of the full pool."""
        return 0 if self.window is None else self.window.evict(self._tree, num_pages)

    def claims(self) -> Iterator[Claim]:
        """Every page of the full pool under its account, except those of parked sequences."""
        yield Claim("free", None, self.allocator.free_pages())
        for account, pages in self._tree.claims():
            yield Claim(account, None, pages)
        for kv in self._in_flight:
            yield Claim("in_flight", kv.holder, kv.private_pages)

    def window_claims(self) -> Iterator[Claim]:
        """The same of the window pool."""
        if self.window is None:
            return
        for account, pages in self.window.claims():
            yield Claim(account, None, pages)
        for kv in self._in_flight:
            assert kv.window is not None
            yield Claim("in_flight", kv.holder, kv.window.live(kv.num_protected_pages))

    def lock_mismatches(self, parked: list[SequenceKV]) -> list[str]:
        """Locks and holds that differ from those of the sequences in flight and the `parked` ones."""
        sequences = [*self._in_flight, *parked]
        wrong = self._tree.lock_mismatches([kv.node for kv in sequences if kv.node is not None])
        if self.window is not None:
            holders = np.zeros(self.window.num_pages, dtype=np.int32)
            for kv in sequences:
                assert kv.window is not None
                holders[kv.window.live(0, kv.num_protected_pages)] += 1
            wrong += self.window.hold_mismatches(holders, self._tree)
        return wrong

    def _shared_window_pages(self) -> list[PageArray]:
        """The tree's window pages that each sequence in flight holds. At least one array."""
        shared = [no_pages()]
        for kv in self._in_flight:
            assert kv.window is not None
            shared.append(kv.window.live(0, kv.num_protected_pages))
        return shared

    def _empty(self, namespace: str, holder: Holder) -> SequenceKV:
        chain = self.identity.chain(namespace, self.page_size)
        kv = SequenceKV(chain, self._account, namespace, windowed=self.window is not None)
        kv.holder = holder
        return kv

    def _match(self, namespace: str, tokens: TokenArray) -> PrefixMatch:
        tree = self._tree.match(namespace, tokens)
        num_unheld = 0
        if self.window is not None:
            entries = self._tree.match_window(tree)
            num_pages = self.window.longest_resumable(entries)
            tree = self._tree.shorten(tree, num_pages * self.page_size)
            num_unheld = self.window.num_unheld(entries[self.window.first_needed(tree.length) : num_pages])
        evictable = PageCounts(self._tree.unlocked_pages(tree), num_unheld)
        return PrefixMatch(namespace, tree, evictable)

    def _share(self, kv: SequenceKV, tokens: TokenArray) -> None:
        num_tokens = min(len(tokens), kv.shareable_len)
        num_tokens -= num_tokens % self.page_size
        if num_tokens <= kv.protected_len:
            return
        start_page = kv.num_protected_pages
        end_page = num_tokens // self.page_size
        own = kv.pages[:end_page].copy()
        known_len, node = self._tree.insert(kv.namespace, tokens[:num_tokens], own)
        new_node, tree_pages = self._tree.lock(TreeMatch(num_tokens, node, len(node.tokens)))
        if kv.node is not None:
            self._tree.unlock(kv.node)
        kv.node = new_node
        known_page = known_len // self.page_size
        if self.window is not None:
            self.window.share(kv, self._tree, known_page, end_page)
        if known_page > start_page:
            # The tree had these tokens already: keep its pages, give up the duplicates.
            kv.replace(start_page, tree_pages[start_page:known_page])
            self.allocator.free(own[start_page:known_page], kv.holder, "freed as a duplicate")
        self.allocator.journal.note(own[max(start_page, known_page) :], "shared", kv.holder)
        kv.protect(num_tokens)

    def _cut(self, kv: SequenceKV, target_len: int) -> None:
        """Cuts private pages first, then the protected prefix if the cut goes that far (its whole pages survive)."""
        self._cut_private(kv, max(target_len, kv.protected_len))
        if target_len < kv.protected_len:
            self._unprotect(kv, target_len - target_len % self.page_size)

    def _cut_private(self, kv: SequenceKV, target_len: int) -> None:
        if self.window is not None:
            self.window.cut(kv, pages_for(target_len, self.page_size))
        self.allocator.free(kv.free_aligned(target_len), kv.holder)

    def _unprotect(self, kv: SequenceKV, target_len: int) -> None:
        """Returns the locks past `target_len` (whole pages). Private pages must be gone already."""
        if kv.num_private_pages or kv.node is None:
            raise BooksError("protected prefix cut under private pages")
        if self.window is not None:
            self.window.cut(kv, target_len // self.page_size)
        kv.node = self._tree.relock_shorter(kv.node, kv.protected_len - target_len)
        kv.drop_protected(target_len)


def _held_by(kv: SequenceKV) -> TreeMatch:
    """The protected prefix of `kv`."""
    return TreeMatch(kv.protected_len, kv.node, len(kv.node.tokens) if kv.node is not None else 0)


def token_array(tokens: object) -> TokenArray:
    """Tokens as the array that the tree needs."""
    return np.asarray(tokens, dtype=np.int32)
