"""RadixTree: page-aligned tree of token prefixes, each node owning the pages of its tokens.

The idea is SGLang's RadixAttention (Zheng et al., 2024). Namespaces have their own roots and never share pages.
Locks count holders along the path from a node to its root; only unlocked leaves are evicted, oldest first.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.pages import BooksError, PageArray, no_pages
from cache.window_table import GONE

TokenArray: TypeAlias = NDArray[np.int32]


class RadixNode:
    """Tokens below a parent (whole pages) and their pages. `children` is keyed by the bytes of a child's first page.

    `window_pages` are those of sliding-window layers, GONE where there are none. A split makes a new *upper* node, so a
    handle on a node always stands for the same end of prefix. `is_offered`: it is in the tree's list of leaves.
    """

    __slots__ = (
        "children",
        "is_offered",
        "last_used",
        "lock_count",
        "namespace",
        "pages",
        "parent",
        "tokens",
        "window_pages",
    )

    def __init__(
        self, namespace: str, parent: RadixNode | None, tokens: TokenArray, pages: PageArray
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.window_pages = np.full(len(pages), GONE, dtype=np.int32)
        self.children: dict[bytes, RadixNode] = {}
        self.lock_count = 0
        self.last_used = 0
        self.is_offered = False

    def upwards(self) -> Iterator[RadixNode]:
        """The nodes of the prefix that ends here, the last one first. The root, which has no tokens, is left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class TreeMatch:
    """Longest cached prefix: `length` tokens, ending `depth` tokens into `node` (None: no match)."""

    length: int
    node: RadixNode | None
    depth: int


NO_MATCH = TreeMatch(0, None, 0)


class RadixTree:
    """Owns its nodes' pages. Counts are in pages; lengths, always multiples of the page size, in tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str, RadixNode] = {}
        self._leaves: list[tuple[int, int, RadixNode]] = []
        """A heap by last use of all unlocked leaves. Some were used since, are locked or no leaves any more."""
        self._clock = 0
        self._num_pages = 0
        self._num_locked = 0

    @property
    def cached_pages(self) -> int:
        """Pages without a lock: evictable."""
        return self._num_pages - self._num_locked

    @property
    def protected_pages(self) -> int:
        return self._num_locked

    def match(self, namespace: str, tokens: TokenArray) -> TreeMatch:
        """Longest whole-page prefix of `tokens` in the tree. Changes nothing."""
        node = self._roots.get(namespace)
        if node is None:
            return NO_MATCH
        length = 0
        while True:
            child = node.children.get(self._child_key(tokens[length:]))
            if child is None:
                return TreeMatch(length, node if length else None, len(node.tokens))
            common = self._common_len(child.tokens, tokens[length:])
            length += common
            if common < len(child.tokens):
                return TreeMatch(length, child, common)
            node = child

    def shorten(self, match: TreeMatch, length: int) -> TreeMatch:
        """The same match, cut to `length` tokens (whole pages)."""
        drop = match.length - length
        for node, depth in _parts(match):
            if drop < depth:
                return TreeMatch(length, node, depth - drop)
            drop -= depth
        return NO_MATCH

    def unlocked_pages(self, match: TreeMatch) -> int:
        """Pages of a match that are evictable now and would not be once it is locked."""
        unlocked = takewhile(lambda part: part[0].lock_count == 0, _parts(match))
        return sum(depth // self._page_size for _, depth in unlocked)

    def locked_pages(self, prefixes: Iterable[TreeMatch]) -> int:
        """Pages of the union of `prefixes` that are locked."""
        counted: dict[int, int] = {}
        for match in prefixes:
            for node, depth in _parts(match):
                known = id(node) in counted
                pages = depth // self._page_size if node.lock_count else 0
                counted[id(node)] = max(pages, counted.get(id(node), 0))
                if known:
                    break  # so are all nodes above it
        return sum(counted.values())

    def lock(self, match: TreeMatch) -> tuple[RadixNode, PageArray]:
        """Locks a non-empty match; returns its node (to unlock later) and the pages from the root down."""
        assert match.node is not None
        node = match.node if match.depth == len(match.node.tokens) else self._split(match.node, match.depth)
        self._add_lock(node, +1)
        return node, self.path_pages(node)

    def unlock(self, node: RadixNode) -> None:
        self._add_lock(node, -1)

    def relock_shorter(self, node: RadixNode, drop_len: int) -> RadixNode | None:
        """Moves a lock from `node` to the prefix that ends `drop_len` tokens earlier (None: nothing left)."""
        shorter = None
        for each in node.upwards():
            if drop_len < len(each.tokens):
                shorter = self._split(each, len(each.tokens) - drop_len) if drop_len else each
                self._add_lock(shorter, +1)
                break
            drop_len -= len(each.tokens)
        self._add_lock(node, -1)
        return shorter

    def insert(self, namespace: str, tokens: TokenArray, pages: PageArray) -> tuple[int, RadixNode]:
        """Adds `tokens` (whole pages, at least one) with their pages.

        Returns how many leading tokens the tree already had, and the node at the end of the prefix, unlocked. The
        caller keeps its pages for those tokens; the tree now owns the others.
        """
        assert len(tokens) > 0
        assert len(tokens) == len(pages) * self._page_size
        match = self.match(namespace, tokens)
        node = match.node or self._root(namespace)
        if match.node is not None and match.depth < len(match.node.tokens):
            node = self._split(match.node, match.depth)
        self._touch(node)
        if match.length == len(tokens):
            return match.length, node
        rest = tokens[match.length :].copy()
        leaf = RadixNode(namespace, node, rest, pages[match.length // self._page_size :].copy())
        node.children[self._child_key(rest)] = leaf
        self._num_pages += len(leaf.pages)
        self._touch(leaf)
        self._offer(leaf)
        return match.length, leaf

    def path_pages(self, node: RadixNode) -> PageArray:
        """Pages of the prefix that ends at `node`, from the root down."""
        return _joined([each.pages for each in node.upwards()])

    def path_window(self, node: RadixNode) -> PageArray:
        """Window pages of the prefix that ends at `node`, from the root down, GONE among them."""
        return self.match_window(TreeMatch(0, node, len(node.tokens)))

    def match_window(self, match: TreeMatch) -> PageArray:
        """Window pages of a match, from the root down, GONE among them."""
        return _joined([node.window_pages[: depth // self._page_size] for node, depth in _parts(match)])

    def place_window(self, node: RadixNode, index: int, page: int) -> None:
        """Page `index` of the prefix that ends at `node` now has its window KV in `page`."""
        start = sum(len(each.pages) for each in node.upwards())
        for each in node.upwards():
            start -= len(each.pages)
            if index >= start:
                assert each.window_pages[index - start] == GONE
                each.window_pages[index - start] = page
                return

    def strip_window(self, num_pages: int, is_unheld: NDArray[np.bool_]) -> PageArray:
        """Takes window pages that no sequence holds, oldest nodes first, until there are `num_pages` (or all)."""
        taken: list[PageArray] = []
        count = 0
        for node in sorted(self._nodes(), key=lambda node: node.last_used):
            if count >= num_pages:
                break
            loose = (node.window_pages != GONE) & is_unheld[node.window_pages]
            taken.append(node.window_pages[loose])
            node.window_pages[loose] = GONE
            count += len(taken[-1])
        return np.concatenate(taken) if taken else no_pages()

    def evict(self, num_pages: int) -> tuple[PageArray, PageArray]:
        """Drops the least recently used unlocked leaves until `num_pages` pages (or all) are out. Returns their pages
        and their window pages. Costs what is dropped, and what was used since it became a leaf."""
        evicted: list[PageArray] = []
        window: list[PageArray] = []
        count = 0
        while self._leaves and count < num_pages:
            last_used, _, leaf = heapq.heappop(self._leaves)
            leaf.is_offered = False
            if last_used < leaf.last_used or leaf.children or leaf.lock_count:
                self._offer(leaf)
                continue
            parent = leaf.parent
            assert parent is not None
            del parent.children[self._child_key(leaf.tokens)]
            evicted.append(leaf.pages)
            window.append(leaf.window_pages)
            count += len(leaf.pages)
            if parent.parent is not None:
                self._offer(parent)
            elif not parent.children:
                del self._roots[parent.namespace]
        self._num_pages -= count
        if not evicted:
            return no_pages(), no_pages()
        return np.concatenate(evicted), np.concatenate(window)

    def window_pages(self) -> PageArray:
        """Window pages of all nodes."""
        parts = [node.window_pages[node.window_pages != GONE] for node in self._nodes()]
        return np.concatenate(parts) if parts else no_pages()

    def claims(self) -> Iterator[tuple[str, PageArray]]:
        """Every node's pages under the account that holds them, for the audit."""
        for node in self._nodes():
            yield ("protected" if node.lock_count else "cached"), node.pages

    def lock_mismatches(self, locked: Iterable[RadixNode]) -> list[str]:
        """Nodes whose lock count differs from the number of `locked` prefix ends below or at them."""
        counts = Counter(id(node) for end in locked for node in end.upwards())
        return [
            f"prefix tree: a node of {len(node.pages)} pages from page {int(node.pages[0])} on is locked "
            f"{node.lock_count} times by {counts[id(node)]} holders"
            for node in self._nodes()
            if node.lock_count != counts[id(node)]
        ]

    def _root(self, namespace: str) -> RadixNode:
        root = self._roots.get(namespace)
        if root is None:
            root = RadixNode(namespace, None, np.empty(0, dtype=np.int32), no_pages())
            self._roots[namespace] = root
        return root

    def _nodes(self) -> Iterator[RadixNode]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def _split(self, node: RadixNode, depth: int) -> RadixNode:
        """Cuts `node` after `depth` tokens; returns the new upper part, which has the lower part's locks. Both parts
        are copies: a view would keep the whole alive for as long as one of them."""
        parent = node.parent
        assert parent is not None
        assert 0 < depth < len(node.tokens)
        num_upper = depth // self._page_size
        upper = RadixNode(node.namespace, parent, node.tokens[:depth].copy(), node.pages[:num_upper].copy())
        upper.lock_count = node.lock_count
        upper.last_used = node.last_used
        parent.children[self._child_key(upper.tokens)] = upper
        node.tokens = node.tokens[depth:].copy()
        node.pages = node.pages[num_upper:].copy()
        upper.window_pages = node.window_pages[:num_upper].copy()
        node.window_pages = node.window_pages[num_upper:].copy()
        node.parent = upper
        upper.children[self._child_key(node.tokens)] = node
        return upper

    def _add_lock(self, node: RadixNode, change: int) -> None:
        """Locking is a use of the path; unlocking is not."""
        if change > 0:
            self._touch(node)
        for each in node.upwards():
            before = each.lock_count
            each.lock_count += change
            if each.lock_count < 0:
                raise BooksError("prefix tree node unlocked more often than locked")
            if before == 0:
                self._num_locked += len(each.pages)
            elif each.lock_count == 0:
                self._num_locked -= len(each.pages)
                self._offer(each)

    def _offer(self, node: RadixNode) -> None:
        """Puts a node that may be an unlocked leaf from now on in the list of these."""
        if not (node.is_offered or node.children or node.lock_count):
            heapq.heappush(self._leaves, (node.last_used, id(node), node))
            node.is_offered = True

    def _touch(self, node: RadixNode) -> None:
        self._clock += 1
        for each in node.upwards():
            each.last_used = self._clock

    def _child_key(self, tokens: TokenArray) -> bytes:
        return tokens[: self._page_size].tobytes()

    def _common_len(self, left: TokenArray, right: TokenArray) -> int:
        """The number of tokens that both start with, in whole pages."""
        size = min(len(left), len(right))
        differs = np.flatnonzero(left[:size] != right[:size])
        common = int(differs[0]) if len(differs) else size
        return common - common % self._page_size


def _parts(match: TreeMatch) -> Iterator[tuple[RadixNode, int]]:
    """The nodes of the match, the last one first, and how many tokens of each belong to it."""
    if match.node is None:
        return
    depth = match.depth
    for node in match.node.upwards():
        yield node, depth
        depth = len(node.parent.tokens) if node.parent is not None else 0


def _joined(last_first: Sequence[PageArray]) -> PageArray:
    return np.concatenate(last_first[::-1]) if last_first else no_pages()
