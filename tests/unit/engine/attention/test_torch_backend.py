"""The CPU backend against the textbook, on random shapes; unused pool entries are NaN, so reading one shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, AttentionItem
from engine.attention.reference import ReferenceAttention
from engine.attention.torch_backend import TorchAttention
from engine.runner.kv_pool import KVPool

LAYERS = 2


def poisoned_pool(num_pages: int, page_size: int, kv_heads: int, dim: int) -> KVPool:
    shape = (LAYERS, 2, kv_heads, num_pages * page_size, dim)
    return KVPool(torch.full(shape, torch.nan), page_size)


class Scene:
    """Random sequences, each cut into history and new tokens, with tables into one poisoned pool."""

    def __init__(self, seed: int, page_size: int, contiguous: bool, decode_only: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.torch_random = torch.Generator().manual_seed(seed)
        kv_heads, group = (int(value) for value in self.random.integers(1, 4, 2))
        self.heads, self.kv_heads, self.dim = kv_heads * group, kv_heads, int(self.random.choice([8, 32]))
        self.page_size = page_size
        count = int(self.random.integers(1, 5))
        self.lengths = [int(value) for value in self.random.integers(1, 70, count)]
        self.queries = [1 if decode_only else int(self.random.integers(1, n + 1)) for n in self.lengths]
        each = -(-70 // page_size)
        pages = np.arange(2 * count * each, dtype=np.int32)
        if not contiguous:
            pages = self.random.permutation(pages)
        self.num_pages = len(pages)
        self.tables = [pages[index * each : (index + 1) * each] for index in range(count)]
        self.contiguous = contiguous

    def items(self, lengths: Sequence[int], queries: Sequence[int]) -> list[AttentionItem]:
        rows = zip(lengths, queries, self.tables, strict=True)
        return [AttentionItem(query, length, table, self.contiguous) for length, query, table in rows]

    def slots(self, items: Sequence[AttentionItem]) -> Tensor:
        return torch.tensor(
            [
                int(item.pages[t // self.page_size]) * self.page_size + t % self.page_size
                for item in items
                for t in range(item.kv_len - item.query_len, item.kv_len)
            ]
        )

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        q_NHD = torch.randn(rows, self.heads, self.dim, generator=self.torch_random)
        return q_NHD, torch.randn(rows, 2, self.kv_heads, self.dim, generator=self.torch_random)


def fill_history(scene: Scene, backend: AttentionBackend, kv: Tensor, items: list[AttentionItem]) -> None:
    step = backend.begin(items, scene.slots(items))
    for layer in range(LAYERS):
        step(layer, torch.zeros(len(kv), scene.heads, scene.dim), kv + layer)


@pytest.mark.parametrize("decode_only", [False, True], ids=["extend", "decode"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_equals_the_reference(page_size: int, contiguous: bool, decode_only: bool) -> None:
    for seed in range(8):
        scene = Scene(seed, page_size, contiguous, decode_only)
        items = scene.items(scene.lengths, scene.queries)
        old = [max(1, length - query) for length, query in zip(scene.lengths, scene.queries, strict=True)]
        history = scene.items(old, old)
        _, history_kv = scene.draw(sum(old))
        draws = [scene.draw(sum(scene.queries)) for _ in range(LAYERS)]
        results = []
        for make in (ReferenceAttention, TorchAttention):
            pool = poisoned_pool(scene.num_pages, page_size, scene.kv_heads, scene.dim)
            backend = make(pool)
            fill_history(scene, backend, history_kv, history)
            step = backend.begin(items, scene.slots(items))
            results.append([step(layer, q_NHD, kv) for layer, (q_NHD, kv) in enumerate(draws)])
        for expected, got in zip(*results, strict=True):
            assert got.shape == (sum(scene.queries), scene.heads * scene.dim)
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5, msg=f"seed {seed}")


def test_strided_queries_and_keys_are_fine() -> None:
    """The model hands in slices of one fused matrix."""
    fused = torch.randn(3, 8, 16)
    q_NHD, kv_N2KD = fused[:, :4], fused[:, 4:].view(3, 2, 2, 16)
    items = [AttentionItem(3, 3, np.arange(3, dtype=np.int32), True)]
    got = [
        make(poisoned_pool(4, 1, 2, 16)).begin(items, torch.arange(3))(0, q_NHD, kv_N2KD)
        for make in (ReferenceAttention, TorchAttention)
    ]
    torch.testing.assert_close(got[1], got[0], atol=2e-5, rtol=2e-5)
