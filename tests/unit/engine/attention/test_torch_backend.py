"""The CPU backend against the textbook, on random shapes; unused pool entries are NaN, so reading one shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.interface import AttentionBackend, AttentionItem, LayerTraits
from engine.attention.torch_backend import TorchAttention
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.reference import ReferenceAttention

WIDE, NARROW = 24, 7
WINDOWS = (None, WIDE, None, NARROW)
"""By layer: two in each pool; the window pool keeps what the wide one needs."""
LONGEST = 70


class Scene:
    """Random sequences, each cut into history and new tokens, with tables into poisoned pools.

    Window pages that only tokens before every window lie in are gone from the tables.
    """

    def __init__(self, seed: int, page_size: int, contiguous: bool, most_queries: int) -> None:
        self.random = np.random.default_rng(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        kv_heads, group = (int(value) for value in self.random.integers(1, 4, 2))
        self.heads, self.kv_heads, self.dim = kv_heads * group, kv_heads, int(self.random.choice([8, 32]))
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
        return q_NHD, torch.randn(rows, 2, self.kv_heads, self.dim, generator=self.torch_random)

    def traits(self, kind: str) -> list[LayerTraits]:
        cap = 3.0 if "cap" in kind else None
        sinks = torch.randn(self.heads, generator=self.torch_random) if "sinks" in kind else None
        return [LayerTraits(0.3, window, cap, sinks) for window in WINDOWS]

    def pool(self) -> KVPool:
        settings = CacheSettings(self.page_size, self.num_pages, window_ratio=1.0)
        pool = make_kv_pool(
            KVLayout(self.kv_heads, self.dim, WINDOWS), settings, torch.float32, torch.device("cpu")
        )
        for paged in (pool.full, pool.window):
            assert paged is not None
            paged.kv_L2KSD.fill_(torch.nan)
        return pool

    def fill_history(self, pool: KVPool, backend: AttentionBackend, kv: Tensor, lengths: list[int]) -> None:
        """Then poisons and forgets the window pages that nobody needs."""
        items = self.items(lengths, lengths)
        step = backend.begin(items, self.slots(items))
        for layer in range(len(WINDOWS)):
            step(layer, torch.zeros(len(kv), self.heads, self.dim), kv + layer, LayerTraits(1.0))
        assert pool.window is not None
        for length, query, table in zip(self.lengths, self.queries, self.window_tables, strict=True):
            gone = max(0, length - query - WIDE + 1) // self.page_size
            for page in table[:gone].tolist():
                if page >= 0:
                    pool.window.kv_L2KSD[:, :, :, page * self.page_size : (page + 1) * self.page_size] = (
                        torch.nan
                    )

    def run(self, make: Callable[[KVPool], AttentionBackend], kind: str) -> list[Tensor]:
        """What every layer gives."""
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


@pytest.mark.parametrize("kind", ["plain", "cap", "sinks", "cap and sinks"])
@pytest.mark.parametrize("most_queries", [1, 9, LONGEST], ids=["decode", "verify", "extend"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_equals_the_reference(page_size: int, contiguous: bool, most_queries: int, kind: str) -> None:
    for seed in range(6):
        expected, got = (
            Scene(seed, page_size, contiguous, most_queries).run(make, kind)
            for make in (ReferenceAttention, TorchAttention)
        )
        for layer, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert one.isfinite().all()
            torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5, msg=f"seed {seed} layer {layer}")


def test_a_window_holds_in_the_full_pool_too() -> None:
    """A draft model keeps its windowed layers there."""
    for seed in range(4):
        results = []
        for make in (ReferenceAttention, TorchAttention):
            scene = Scene(seed, 4, False, 9)
            layout = KVLayout(scene.kv_heads, scene.dim, (None,))
            pool = make_kv_pool(layout, CacheSettings(4, scene.num_pages), torch.float32, torch.device("cpu"))
            backend = make(pool)
            for lengths, queries in ((scene.lengths, scene.lengths), (scene.lengths, scene.queries)):
                items = scene.items(lengths, queries)
                step = backend.begin(items, scene.slots(items)[:1])
                results.append(step(0, *scene.draw(sum(queries)), LayerTraits(0.3, NARROW)))
        torch.testing.assert_close(results[2:], results[:2], atol=2e-5, rtol=2e-5)


def test_many_rows_with_caps_go_in_blocks() -> None:
    q_NHD, kv_N2KD = torch.randn(150, 4, 8), torch.randn(150, 2, 2, 8)
    items = [AttentionItem(150, 150, np.arange(150, dtype=np.int32), True)]
    layout, settings = KVLayout(2, 8, (None,)), CacheSettings(1, 150)
    for traits in (LayerTraits(0.3, None, 2.0), LayerTraits(0.3, 100, 2.0, torch.randn(4))):
        got = []
        for make in (ReferenceAttention, TorchAttention):
            pool = make_kv_pool(layout, settings, torch.float32, torch.device("cpu"))
            got.append(make(pool).begin(items, torch.arange(150)[None])(0, q_NHD, kv_N2KD, traits))
        torch.testing.assert_close(got[1], got[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_strided_queries_and_keys_are_fine(rows: int) -> None:
    """Native models hand in slices of one fused matrix, the bridge heads before rows."""
    fused = torch.randn(rows, 8, 16)
    heads_first = torch.randn(8, rows, 16).transpose(0, 1)
    items = [AttentionItem(rows, rows, np.arange(rows, dtype=np.int32), True)]
    for source in (fused, heads_first):
        q_NHD, kv_N2KD = source[:, :4], source[:, 4:].unflatten(1, (2, 2))
        got = []
        for make in (ReferenceAttention, TorchAttention):
            pool = make_kv_pool(
                KVLayout(2, 16, (None,)), CacheSettings(1, 40), torch.float32, torch.device("cpu")
            )
            step = make(pool).begin(items, torch.arange(rows)[None])
            got.append(step(0, q_NHD, kv_N2KD, LayerTraits(0.25)))
        torch.testing.assert_close(got[1], got[0], atol=2e-5, rtol=2e-5)


def test_a_scattered_table_is_read_where_it_lies() -> None:
    """A step that copied it would cost its length once more."""
    pool = make_kv_pool(KVLayout(2, 16, (None,)), CacheSettings(1, 40), torch.float32, torch.device("cpu"))
    table = np.array([5, 1, 7, 30], dtype=np.int32)
    step = TorchAttention(pool).begin([AttentionItem(1, 4, table, False)], torch.tensor([[30]]))
    step(0, torch.ones(1, 4, 16), torch.ones(1, 2, 2, 16), LayerTraits(0.25))
    ((span,),) = step._plans.values()
    assert span.pages is not None
    assert np.shares_memory(span.pages.numpy(), table)
