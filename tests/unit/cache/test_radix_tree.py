"""RadixTree: matches in full pages, splits that keep locks exact, LRU eviction, separate namespaces."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from cache.pages import BooksError, PageArray
from cache.prefix_cache import token_array
from cache.radix_tree import RadixNode, RadixTree, TokenArray
from tests.unit.cache.books import PAGE_SIZES, joined, tokens_from
from tests.unit.operations import bytecodes


class PagedTree:
    """A RadixTree whose pages get ascending numbers."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixTree(page_size)
        self.page_size = page_size
        self._next_page = 0

    def insert(self, tokens: TokenArray, namespace: str = "") -> tuple[int, RadixNode]:
        count = len(tokens) // self.page_size
        pages = np.arange(self._next_page, self._next_page + count, dtype=np.int32)
        self._next_page += count
        return self.tree.insert(namespace, tokens, pages)

    def lock(self, tokens: TokenArray, namespace: str = "") -> tuple[RadixNode, PageArray]:
        return self.tree.lock(self.tree.match(namespace, tokens))

    def match_len(self, tokens: TokenArray, namespace: str = "") -> int:
        return self.tree.match(namespace, tokens).length

    def evict(self, num_pages: int) -> PageArray:
        return self.tree.evict(num_pages)[0]

    def counts(self) -> tuple[int, int]:
        """The numbers of (cached, protected) pages, checked against a walk over the nodes."""
        walked = {"cached": 0, "protected": 0}
        for account, pages in self.tree.claims():
            walked[account] += len(pages)
        counts = (self.tree.cached_pages, self.tree.protected_pages)
        assert counts == (walked["cached"], walked["protected"])
        return counts


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_match_is_the_longest_prefix_in_whole_pages(page_size: int) -> None:
    paged = PagedTree(page_size)
    tokens = tokens_from(0, 3 * page_size)
    paged.insert(tokens)
    for length in (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size):
        assert paged.match_len(tokens[:length]) == length - length % page_size
    differs_late = tokens.copy()
    differs_late[-1] += 1
    assert paged.match_len(differs_late) == 2 * page_size
    assert paged.match_len(joined(tokens, tokens)) == 3 * page_size
    assert paged.match_len(tokens_from(1, 3 * page_size)) == 0


def test_match_changes_nothing() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 16)
    paged.insert(tokens)
    before = [(id(node), node.last_used, node.lock_count) for node in paged.tree._nodes()]
    paged.tree.match("", tokens[:8])
    paged.tree.match("nobody", tokens)
    assert [(id(node), node.last_used, node.lock_count) for node in paged.tree._nodes()] == before
    assert set(paged.tree._roots) == {""}


def test_insert_returns_what_was_known_and_owns_the_rest() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 16)
    assert paged.insert(tokens[:8])[0] == 0
    known_len, node = paged.insert(tokens)
    assert known_len == 8
    assert paged.tree.path_pages(node).tolist() == [0, 1, 4, 5], "pages 2 and 3 stay with the caller"
    assert paged.insert(tokens[:12])[0] == 12
    assert paged.counts() == (4, 0)


def test_namespaces_never_share() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 8)
    paged.insert(tokens, "tenant-a")
    assert paged.match_len(tokens, "tenant-b") == 0
    assert paged.match_len(tokens, "") == 0
    assert paged.insert(tokens, "tenant-b")[0] == 0
    assert paged.counts() == (4, 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_lock_in_mid_node_protects_only_its_prefix(page_size: int) -> None:
    paged = PagedTree(page_size)
    tokens = tokens_from(0, 4 * page_size)
    paged.insert(tokens)
    node, pages = paged.lock(tokens[: 3 * page_size])
    assert pages.tolist() == [0, 1, 2]
    assert paged.counts() == (1, 3)
    paged.tree.unlock(node)
    assert paged.counts() == (4, 0)


def test_split_by_unrelated_traffic_keeps_locks_exact() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 24)
    paged.insert(tokens)
    holders = [paged.lock(tokens[:length])[0] for length in (24, 24, 16)]
    assert paged.counts() == (0, 6)
    for cut in (8, 4, 20):  # other sequences branch off here and split the locked nodes
        paged.insert(joined(tokens[:cut], tokens_from(1000 * cut, 8)))
    assert paged.counts() == (6, 6)
    for node, length in zip(holders, (24, 24, 16), strict=True):
        assert paged.tree.path_pages(node).tolist() == list(range(length // 4))
        paged.tree.unlock(node)
    assert paged.counts() == (12, 0)
    assert len(paged.evict(100)) == 12
    assert paged.counts() == (0, 0)


def test_what_is_left_of_a_split_prefix_keeps_no_more_alive_than_itself() -> None:
    """The long rest of two prompts gives way, and the page that they began with stays in use."""
    paged = PagedTree(4)
    system = tokens_from(0, 4)
    for first in (1000, 2000):
        paged.insert(joined(system, tokens_from(first, 400)))
    paged.lock(system)
    assert all(array.base is None for node in paged.tree._nodes() for array in arrays_of(node))
    paged.evict(200)
    (left,) = paged.tree._nodes()
    assert sum(array.nbytes for array in arrays_of(left)) == 4 * 4 + 2 * 4


def arrays_of(node: RadixNode) -> list[NDArray[np.int32]]:
    return [node.tokens, node.pages, node.window_pages]


def test_unlocking_more_than_was_locked_is_an_error() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 8)
    paged.insert(tokens)
    node, _ = paged.lock(tokens)
    paged.tree.unlock(node)
    with pytest.raises(BooksError, match="unlocked more often than locked"):
        paged.tree.unlock(node)


@pytest.mark.parametrize("drop_pages", [0, 1, 2, 3, 4, 5, 6])
def test_relock_shorter_moves_exactly_one_lock(drop_pages: int) -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 24)
    for length in (8, 12, 24):  # three nodes: 2, 1 and 3 pages
        paged.insert(tokens[:length])
    other, _ = paged.lock(tokens[:8])
    node, _ = paged.lock(tokens)
    shorter = paged.tree.relock_shorter(node, 4 * drop_pages)
    kept = 6 - drop_pages
    assert paged.counts() == (6 - max(kept, 2), max(kept, 2))
    assert (shorter is None) == (kept == 0)
    if shorter is not None:
        assert len(paged.tree.path_pages(shorter)) == kept
        paged.tree.unlock(shorter)
    assert paged.counts() == (4, 2)
    paged.tree.unlock(other)
    assert paged.counts() == (6, 0)


def test_unlocked_pages_is_what_a_lock_would_take_from_the_evictable() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 24)
    paged.insert(tokens)
    paged.lock(tokens[:8])
    for length in (4, 8, 12, 20, 24):
        match = paged.tree.match("", tokens[:length])
        cached_before, _ = paged.counts()
        expected = paged.tree.unlocked_pages(match)
        node, _ = paged.tree.lock(match)
        assert cached_before - paged.counts()[0] == expected
        paged.tree.unlock(node)


def test_eviction_is_least_recently_used_first() -> None:
    paged = PagedTree(4)
    names = ("old", "older", "new")
    first_of = {"older": 0, "old": 100, "new": 200}
    for name in ("older", "old", "new"):
        paged.insert(tokens_from(first_of[name], 8))
    node, _ = paged.lock(tokens_from(first_of["old"], 8))
    paged.tree.unlock(node)
    evicted = []
    for _ in names:
        before = {name for name in names if paged.match_len(tokens_from(first_of[name], 8))}
        assert len(paged.evict(1)) == 2, "a leaf goes as a whole"
        after = {name for name in names if paged.match_len(tokens_from(first_of[name], 8))}
        evicted += list(before - after)
    assert evicted == ["older", "new", "old"]


def test_letting_go_of_a_prefix_is_not_a_use() -> None:
    """A session that was closed, or saved to the host, made its own prompt the most recently used one."""
    paged = PagedTree(4)
    closed, popular = tokens_from(0, 8), tokens_from(100, 8)
    paged.insert(closed)
    paged.insert(popular)
    held, _ = paged.lock(closed)
    hit, _ = paged.lock(popular)
    paged.tree.unlock(hit)
    paged.tree.unlock(held)
    paged.evict(1)
    assert (paged.match_len(closed), paged.match_len(popular)) == (0, 8)


def test_eviction_takes_leaves_before_their_parents() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 16)
    paged.insert(tokens[:8])
    paged.insert(tokens)
    paged.evict(1)
    assert paged.match_len(tokens) == 8
    paged.evict(1)
    assert paged.match_len(tokens) == 0


def test_locked_nodes_and_their_parents_are_never_evicted() -> None:
    paged = PagedTree(4)
    tokens = tokens_from(0, 24)
    paged.insert(tokens)
    node, _ = paged.lock(tokens[:8])
    branch = joined(tokens[:4], tokens_from(500, 8))
    paged.insert(branch)
    assert len(paged.evict(1000)) == 6
    assert paged.match_len(tokens) == 8
    assert paged.counts() == (0, 2)
    paged.tree.unlock(node)
    assert len(paged.evict(1000)) == 2


def test_eviction_forgets_empty_namespaces() -> None:
    paged = PagedTree(4)
    for tenant in range(5):
        paged.insert(tokens_from(0, 8), f"tenant-{tenant}")
    paged.evict(1000)
    assert not paged.tree._roots
    paged.insert(tokens_from(0, 8), "tenant-1")
    assert paged.match_len(tokens_from(0, 8), "tenant-1") == 8


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_random_traffic_agrees_with_a_list_of_prefixes(page_size: int) -> None:
    rng = random.Random(page_size)
    paged = PagedTree(page_size)
    known: set[tuple[int, ...]] = set()
    locks: list[RadixNode] = []
    for _ in range(400):
        tokens = token_array([rng.randrange(2) for _ in range(page_size * rng.randrange(1, 6))])
        expected = next(
            (
                size
                for size in range(len(tokens), 0, -page_size)
                if any(prefix[:size] == tuple(tokens[:size]) for prefix in known)
            ),
            0,
        )
        assert paged.match_len(tokens) == expected
        action = rng.random()
        if action < 0.6:
            assert paged.insert(tokens)[0] == expected
            known.add(tuple(tokens))
        elif action < 0.8 and expected:
            locks.append(paged.lock(tokens)[0])
        elif locks:
            paged.tree.unlock(locks.pop(rng.randrange(len(locks))))
        paged.counts()
    for node in locks:
        paged.tree.unlock(node)
    assert paged.counts()[1] == 0


@pytest.mark.parametrize("seed", range(5))
def test_what_is_evicted_is_the_oldest_of_all_leaves_without_a_lock(seed: int) -> None:
    """Whatever was shared, locked and used before. In the end nothing is left behind."""
    rng = random.Random(seed)
    paged, locks = PagedTree(1), list[RadixNode]()
    for _ in range(1500):
        tokens = token_array([rng.randrange(3) for _ in range(rng.randrange(1, 7))])
        action = rng.random()
        if action < 0.4:
            paged.insert(tokens)
        elif action < 0.6 and paged.match_len(tokens):
            locks.append(paged.lock(tokens)[0])
        elif action < 0.75 and locks:
            paged.tree.unlock(locks.pop(rng.randrange(len(locks))))
        elif action < 0.8 and locks:
            node = locks.pop()
            shorter = paged.tree.relock_shorter(node, rng.randrange(1 + len(paged.tree.path_pages(node))))
            locks += [] if shorter is None else [shorter]
        else:
            leaves = [node for node in paged.tree._nodes() if not node.children and not node.lock_count]
            oldest = min(leaves, key=lambda node: node.last_used, default=None)
            expected = [] if oldest is None else oldest.pages.tolist()
            assert paged.evict(1).tolist() == expected
    for node in locks:
        paged.tree.unlock(node)
    paged.evict(paged.counts()[0])
    assert paged.counts() == (0, 0)


def test_an_eviction_looks_at_no_prefix_that_stays() -> None:
    """It looked at all of them: 15 ms of a step at 20,000."""
    counts = []
    for num_prefixes in (20, 2000):
        paged = PagedTree(1)
        for first in range(num_prefixes):
            paged.insert(tokens_from(10 * first, 2))
        counts.append(bytecodes(partial(paged.evict, 1)))
    assert counts[0] == counts[1]
