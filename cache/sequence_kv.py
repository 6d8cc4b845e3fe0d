"""SequenceKV: the pages of one sequence and how far they are filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cache.pages import PageArray, no_pages

if TYPE_CHECKING:
    from cache.radix_tree import RadixNode

_INITIAL_CAPACITY = 16


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens need."""
    return -(-num_tokens // page_size)


class SequenceKV:
    """Page table of one sequence, owned by exactly one holder at a time: a live request or a session's slot.

    Invariant: protected_len <= committed_len <= allocated_len; the table has ceil(allocated_len / page_size)
    pages. The first `protected_len` tokens (whole pages) lie in pages of the prefix tree, locked through `node`; the
    sequence may read but never write or free them. Lengths are in tokens.
    """

    __slots__ = ("_buffer", "allocated_len", "committed_len", "contiguous", "namespace", "node", "num_pages",
                 "page_size", "protected_len")  # fmt: skip

    def __init__(self, page_size: int, namespace: str = "") -> None:
        self.page_size = page_size
        self.namespace = namespace
        self._buffer = np.empty(_INITIAL_CAPACITY, dtype=np.int32)
        self.num_pages = 0
        self.allocated_len = 0
        self.committed_len = 0
        self.protected_len = 0
        self.node: RadixNode | None = None
        self.contiguous = True

    @property
    def pages(self) -> PageArray:
        """Read-only by convention: a view of the page table, valid until the sequence next changes."""
        return self._buffer[: self.num_pages]

    @property
    def num_private_pages(self) -> int:
        return self.num_pages - self.protected_len // self.page_size

    @property
    def private_pages(self) -> PageArray:
        return self._buffer[self.protected_len // self.page_size : self.num_pages]

    @property
    def last_page(self) -> int | None:
        return int(self._buffer[self.num_pages - 1]) if self.num_pages else None

    def pages_missing(self, target_len: int) -> int:
        """Pages to add before `target_len` tokens fit."""
        return max(0, pages_for(target_len, self.page_size) - self.num_pages)

    def grow(self, pages: PageArray, allocated_len: int) -> None:
        """Takes ownership of `pages`, which must be exactly those missing for `allocated_len` tokens."""
        count = len(pages)
        end = self.num_pages + count
        if count:
            if end > len(self._buffer):
                grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int32)
                grown[: self.num_pages] = self.pages
                self._buffer = grown
            self._buffer[self.num_pages : end] = pages
            if self.contiguous:
                self.contiguous = _is_run(self._buffer[max(self.num_pages - 1, 0) : end])
            self.num_pages = end
        self.allocated_len = max(self.allocated_len, allocated_len)
        assert self.num_pages == pages_for(self.allocated_len, self.page_size)

    def free_aligned(self, target_len: int) -> PageArray:
        """Cuts every length to `target_len` and gives up the pages wholly past it; a part-filled page stays.

        Must not cut into the protected prefix: the cache unprotects first.
        """
        assert target_len >= self.protected_len
        if self.allocated_len <= target_len:
            return no_pages()
        keep = pages_for(target_len, self.page_size)
        freed = self._buffer[keep : self.num_pages].copy()
        self.num_pages = keep
        self.allocated_len = target_len
        self.committed_len = min(self.committed_len, target_len)
        if not self.contiguous:
            self.contiguous = _is_run(self.pages)
        return freed

    def replace(self, start_page: int, pages: PageArray) -> None:
        """Points the table at other pages with the same KV (the tree's copy of a prefix)."""
        self._buffer[start_page : start_page + len(pages)] = pages
        self.contiguous = _is_run(self.pages)

    def __repr__(self) -> str:
        return (
            f"SequenceKV(pages={self.num_pages}, allocated={self.allocated_len}, "
            f"committed={self.committed_len}, protected={self.protected_len})"
        )


def _is_run(pages: PageArray) -> bool:
    return bool((np.diff(pages) == 1).all())
