"""RadixTree: page-aligned tree of token prefixes, each node owning the pages of its tokens.

The idea is SGLang's RadixAttention (Zheng et al., 2024). Namespaces have their own roots and never share pages.
Locks count holders along the path from a node to its root; only unlocked leaves are evicted, oldest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cache.pages import BooksError, PageArray, no_pages

TokenArray: TypeAlias = NDArray[np.int32]


class RadixNode:
    """Tokens below a parent (whole pages) and their pages. `children` is keyed by the bytes of a child's first page.

    A split makes a new *upper* node, so a handle on a node always stands for the same end of prefix.
    """

    __slots__ = ("children", "last_used", "lock_count", "namespace", "pages", "parent", "tokens")

    def __init__(
        self, namespace: str, parent: RadixNode | None, tokens: TokenArray, pages: PageArray
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}
        self.lock_count = 0
        self.last_used = 0


@dataclass(frozen=True, slots=True)
class TreeMatch:
    """Longest cached prefix: `length` tokens, ending `depth` tokens into `node` (None: no match)."""

    length: int
    node: RadixNode | None
    depth: int


class RadixTree:
    """Owns its nodes' pages. Counts are in pages; lengths, always multiples of the page size, in tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str, RadixNode] = {}
        self._clock = 0
        self._num_pages = 0
        self._num_locked = 0

    @property
    def cached_pages(self) -> int:
        """Pages no one holds a lock on: evictable."""
        return self._num_pages - self._num_locked

    @property
    def protected_pages(self) -> int:
        return self._num_locked

    def match(self, namespace: str, tokens: TokenArray) -> TreeMatch:
        """Longest whole-page prefix of `tokens` in the tree. Changes nothing."""
        node = self._roots.get(namespace)
        if node is None:
            return TreeMatch(0, None, 0)
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

    def unlocked_pages(self, match: TreeMatch) -> int:
        """Pages of a match that are evictable now and would not be once it is locked."""
        node, length, count = match.node, match.depth, 0
        while node is not None and node.lock_count == 0 and node.parent is not None:
            count += length // self._page_size
            node = node.parent
            length = len(node.tokens)
        return count

    def locked_pages(self, prefixes: Iterable[TreeMatch]) -> int:
        """Pages of the union of `prefixes` that are locked by anybody."""
        counted: dict[int, int] = {}
        for match in prefixes:
            node, length = match.node, match.depth
            while node is not None and node.parent is not None:
                known = id(node) in counted
                pages = length // self._page_size if node.lock_count else 0
                counted[id(node)] = max(pages, counted.get(id(node), 0))
                if known:
                    break  # so are all above it
                node = node.parent
                length = len(node.tokens)
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
        shorter: RadixNode | None = node
        while shorter is not None and shorter.parent is not None and drop_len >= len(shorter.tokens):
            drop_len -= len(shorter.tokens)
            shorter = shorter.parent
        assert shorter is not None
        if drop_len:
            shorter = self._split(shorter, len(shorter.tokens) - drop_len)
        if shorter.parent is not None:
            self._add_lock(shorter, +1)
        self._add_lock(node, -1)
        return shorter if shorter.parent is not None else None

    def insert(self, namespace: str, tokens: TokenArray, pages: PageArray) -> tuple[int, RadixNode]:
        """Adds `tokens` (whole pages, at least one) with their pages.

        Returns how many leading tokens the tree had already (the caller keeps its pages for those; the tree owns
        the others now) and the node at the end of the prefix, unlocked.
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
        return match.length, leaf

    def path_pages(self, node: RadixNode) -> PageArray:
        """Pages of the prefix that ends at `node`, from the root down."""
        parts: list[PageArray] = []
        current: RadixNode | None = node
        while current is not None:
            parts.append(current.pages)
            current = current.parent
        return np.concatenate(parts[::-1])

    def evict(self, num_pages: int) -> PageArray:
        """Drops least recently used unlocked leaves until `num_pages` pages (or all) are out; returns their pages."""
        heap = [(n.last_used, id(n), n) for n in self._nodes() if not n.children and n.lock_count == 0]
        heapq.heapify(heap)
        evicted: list[PageArray] = []
        count = 0
        while heap and count < num_pages:
            _, _, leaf = heapq.heappop(heap)
            parent = leaf.parent
            assert parent is not None
            del parent.children[self._child_key(leaf.tokens)]
            evicted.append(leaf.pages)
            count += len(leaf.pages)
            if not parent.children and parent.lock_count == 0:
                if parent.parent is not None:
                    heapq.heappush(heap, (parent.last_used, id(parent), parent))
                else:
                    del self._roots[parent.namespace]
        self._num_pages -= count
        return np.concatenate(evicted) if evicted else no_pages()

    def claims(self) -> Iterator[tuple[str, PageArray]]:
        """Every node's pages under the account that holds them, for the audit."""
        for node in self._nodes():
            yield ("protected" if node.lock_count else "cached"), node.pages

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
        """Cuts `node` after `depth` tokens; returns the new upper part, which has the lower part's locks."""
        parent = node.parent
        assert parent is not None
        assert 0 < depth < len(node.tokens)
        num_upper = depth // self._page_size
        upper = RadixNode(node.namespace, parent, node.tokens[:depth], node.pages[:num_upper])
        upper.lock_count = node.lock_count
        upper.last_used = node.last_used
        parent.children[self._child_key(upper.tokens)] = upper
        node.tokens = node.tokens[depth:]
        node.pages = node.pages[num_upper:]
        node.parent = upper
        upper.children[self._child_key(node.tokens)] = node
        return upper

    def _add_lock(self, node: RadixNode, change: int) -> None:
        self._touch(node)
        current: RadixNode | None = node
        while current is not None and current.parent is not None:
            before = current.lock_count
            current.lock_count += change
            if current.lock_count < 0:
                raise BooksError("prefix tree node unlocked more often than locked")
            if before == 0:
                self._num_locked += len(current.pages)
            elif current.lock_count == 0:
                self._num_locked -= len(current.pages)
            current = current.parent

    def _touch(self, node: RadixNode) -> None:
        self._clock += 1
        current: RadixNode | None = node
        while current is not None:
            current.last_used = self._clock
            current = current.parent

    def _child_key(self, tokens: TokenArray) -> bytes:
        return tokens[: self._page_size].tobytes()

    def _common_len(self, left: TokenArray, right: TokenArray) -> int:
        """Tokens that both start with, in whole pages."""
        size = min(len(left), len(right))
        differs = np.flatnonzero(left[:size] != right[:size])
        common = int(differs[0]) if len(differs) else size
        return common - common % self._page_size
