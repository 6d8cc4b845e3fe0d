"""The CPU backend against the reference, on random shapes. Unused pool entries are NaN, so that reading one shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.interface import AttentionItem, LayerTraits
from engine.attention.torch_backend import TorchAttention
from engine.runner.kv_pool import KVLayout, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.item_scene import LONGEST, NARROW, Scene, seeds_of
from tests.unit.engine.attention.reference import ReferenceAttention


@pytest.mark.parametrize("kind", ["plain", "cap", "sinks", "cap and sinks"])
@pytest.mark.parametrize("most_queries", [1, 9, LONGEST], ids=["decode", "verify", "extend"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_equals_the_reference(page_size: int, contiguous: bool, most_queries: int, kind: str) -> None:
    for seed in seeds_of(page_size, most_queries, kind):
        expected, got = (
            Scene(seed, page_size, contiguous, most_queries).run(make, kind)
            for make in (ReferenceAttention, TorchAttention)
        )
        for layer, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert one.isfinite().all()
            torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5, msg=f"seed {seed} layer {layer}")


@pytest.mark.parametrize("kind", ["plain", "cap and sinks"])
@pytest.mark.parametrize("most_queries", [1, 9, LONGEST], ids=["decode", "verify", "extend"])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_latents_equal_the_reference(page_size: int, contiguous: bool, most_queries: int, kind: str) -> None:
    for seed in seeds_of(page_size, most_queries, kind):
        expected, got = (
            Scene(seed, page_size, contiguous, most_queries, latent=True).run(make, kind)
            for make in (ReferenceAttention, TorchAttention)
        )
        for layer, (one, other) in enumerate(zip(expected, got, strict=True)):
            torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5, msg=f"seed {seed} layer {layer}")


def test_a_window_holds_in_the_full_pool_too() -> None:
    """A draft model keeps its windowed layers in the full pool."""
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
    q_NHD, kv_NJKD = torch.randn(150, 4, 8), torch.randn(150, 2, 2, 8)
    items = [AttentionItem(150, 150, np.arange(150, dtype=np.int32), True)]
    layout, settings = KVLayout(2, 8, (None,)), CacheSettings(1, 150)
    for traits in (LayerTraits(0.3, None, 2.0), LayerTraits(0.3, 100, 2.0, torch.randn(4))):
        got = []
        for make in (ReferenceAttention, TorchAttention):
            pool = make_kv_pool(layout, settings, torch.float32, torch.device("cpu"))
            got.append(make(pool).begin(items, torch.arange(150)[None])(0, q_NHD, kv_NJKD, traits))
        torch.testing.assert_close(got[1], got[0], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_strided_queries_and_keys_are_fine(rows: int) -> None:
    """Native models pass slices of one fused matrix. The bridge passes heads before rows."""
    fused = torch.randn(rows, 8, 16)
    heads_first = torch.randn(8, rows, 16).transpose(0, 1)
    items = [AttentionItem(rows, rows, np.arange(rows, dtype=np.int32), True)]
    for source in (fused, heads_first):
        q_NHD, kv_NJKD = source[:, :4], source[:, 4:].unflatten(1, (2, 2))
        got = []
        for make in (ReferenceAttention, TorchAttention):
            pool = make_kv_pool(
                KVLayout(2, 16, (None,)), CacheSettings(1, 40), torch.float32, torch.device("cpu")
            )
            step = make(pool).begin(items, torch.arange(rows)[None])
            got.append(step(0, q_NHD, kv_NJKD, LayerTraits(0.25)))
        torch.testing.assert_close(got[1], got[0], atol=2e-5, rtol=2e-5)


def test_a_scattered_table_is_read_where_it_lies() -> None:
    """A step that copied the table would cost its length once more."""
    pool = make_kv_pool(KVLayout(2, 16, (None,)), CacheSettings(1, 40), torch.float32, torch.device("cpu"))
    table = np.array([5, 1, 7, 30], dtype=np.int32)
    step = TorchAttention(pool).begin([AttentionItem(1, 4, table, False)], torch.tensor([[30]]))
    step(0, torch.ones(1, 4, 16), torch.ones(1, 2, 2, 16), LayerTraits(0.25))
    ((span,),) = step._plans.values()
    assert span.pages is not None
    assert np.shares_memory(span.pages.numpy(), table)
