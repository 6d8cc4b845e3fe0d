"""Random sequences in paged pools, for the CPU's attention backends. Unused entries are NaN, so that reading one
shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import AttentionBackend, AttentionItem, LayerTraits
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.reference import ReferenceStep

WIDE, NARROW = 24, 7
WINDOWS = (None, WIDE, None, NARROW)
"""The window of each layer. Each pool has two layers. The window pool keeps what the wide window needs."""
LONGEST = 70


def seeds_of(page_size: int, most_queries: int, kind: str) -> range:
    """Three seeds for a cell of a matrix. Most cells have others, so that there are many numbers of heads."""
    first = 3 * (page_size + most_queries + len(kind))
    return range(first, first + 3)


class Scene:
    """Random sequences, each cut into history and new tokens, with tables into poisoned pools.

    A window page is gone from the tables if all of its tokens lie before every window. With `latent` a token has one
    vector for all heads.
    """

    def __init__(
        self, seed: int, page_size: int, contiguous: bool, most_queries: int, *, latent: bool = False
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        kv_heads, group = (int(value) for value in self.random.integers(1, 4, 2))
        self.heads, self.kv_heads, self.dim = kv_heads * group, kv_heads, int(self.random.choice([8, 32]))
        self.latent_dim = None
        if latent:
            self.heads, self.kv_heads = int(self.random.choice([1, 5, 16, 35])), 1
            self.latent_dim = int(self.random.integers(1, self.dim))
        self.page_size = page_size
        count = int(self.random.integers(1, 5))
        self.lengths = [int(value) for value in self.random.integers(1, LONGEST, count)]
        self.queries = [int(self.random.integers(1, min(n, most_queries) + 1)) for n in self.lengths]
        self.contiguous = contiguous
        self.tables, self.window_tables = self._tables(count), self._tables(count)

    def _tables(self, count: int) -> list[NDArray[np.int32]]:
        each = -(-LONGEST // self.page_size)
        self.num_pages = 2 * count * each
        pages = np.arange(self.num_pages, dtype=np.int32)
        if not self.contiguous:
            pages = self.random.permutation(pages)
        return [pages[index * each : (index + 1) * each].copy() for index in range(count)]

    def items(self, lengths: Sequence[int], queries: Sequence[int]) -> list[AttentionItem]:
        rows = zip(lengths, queries, self.tables, self.window_tables, strict=True)
        return [
            AttentionItem(query, length, table, self.contiguous, window)
            for length, query, table, window in rows
        ]

    def slots(self, items: Sequence[AttentionItem]) -> Tensor:
        rows = []
        for windowed in (False, True):
            rows.append([])
            for item in items:
                pages = item.window_pages if windowed else item.pages
                assert pages is not None
                rows[-1] += [
                    int(pages[t // self.page_size]) * self.page_size + t % self.page_size
                    for t in range(item.kv_len - item.query_len, item.kv_len)
                ]
        return torch.tensor(rows)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        q_NHD = 2 * torch.randn(rows, self.heads, self.dim, generator=self.torch_random)
        vectors = self.layout.num_vectors
        return q_NHD, torch.randn(rows, vectors, self.kv_heads, self.dim, generator=self.torch_random)

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.kv_heads, self.dim, WINDOWS, self.latent_dim)

    def traits(self, kind: str) -> list[LayerTraits]:
        cap = 3.0 if "cap" in kind else None
        sinks = torch.randn(self.heads, generator=self.torch_random) if "sinks" in kind else None
        return [LayerTraits(0.3, window, cap, sinks) for window in WINDOWS]

    def pool(self) -> KVPool:
        settings = CacheSettings(self.page_size, self.num_pages, window_ratio=1.0)
        pool = make_kv_pool(self.layout, settings, torch.float32, torch.device("cpu"))
        for paged in (pool.full, pool.window):
            assert paged is not None
            paged.kv_LJKSD.fill_(torch.nan)
        return pool

    def fill_history(self, pool: KVPool, backend: AttentionBackend, kv: Tensor, lengths: list[int]) -> None:
        """Writes the history through the backend, then poisons the window pages that nobody needs. The reference only
        writes: nobody reads what it would compute."""
        items = self.items(lengths, lengths)
        step = backend.begin(items, self.slots(items))
        for layer in range(len(WINDOWS)):
            if isinstance(step, ReferenceStep):
                step.write(layer, kv + layer)
            else:
                step(layer, torch.zeros(len(kv), self.heads, self.dim), kv + layer, LayerTraits(1.0))
        assert pool.window is not None
        for length, query, table in zip(self.lengths, self.queries, self.window_tables, strict=True):
            gone = max(0, length - query - WIDE + 1) // self.page_size
            for page in table[:gone].tolist():
                if page >= 0:
                    pool.window.kv_LJKSD[:, :, :, page * self.page_size : (page + 1) * self.page_size] = (
                        torch.nan
                    )

    def run(self, make: Callable[[KVPool], AttentionBackend], kind: str) -> list[Tensor]:
        """Runs one step. Returns the output of every layer."""
        pool = self.pool()
        backend = make(pool)
        history = [max(1, length - query) for length, query in zip(self.lengths, self.queries, strict=True)]
        self.fill_history(pool, backend, self.draw(sum(history))[1], history)
        items = self.items(self.lengths, self.queries)
        for item in items:
            assert item.window_pages is not None
            item.window_pages[: max(0, item.kv_len - item.query_len - WIDE + 1) // self.page_size] = -1
        step = backend.begin(items, self.slots(items))
        return [
            step(layer, *self.draw(sum(self.queries)), traits)
            for layer, traits in enumerate(self.traits(kind))
        ]
