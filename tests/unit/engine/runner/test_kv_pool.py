"""The size of the pools, the cost of a page, and the place of each layer."""

from __future__ import annotations

import pytest
import torch

from engine.memory import MemoryShort
from engine.runner.kv_pool import KVLayout, make_kv_pool
from engine.settings import CacheSettings, PoolTooSmall

CPU = torch.device("cpu")
FULL = KVLayout(num_kv_heads=2, head_dim=8, windows=(None, None, None))
MIXED = KVLayout(num_kv_heads=2, head_dim=8, windows=(64, None, 32))
LAYER_BYTES = 16 * 2 * 2 * 8 * 4
"""The bytes of one page of one layer."""


def test_pages_by_number_and_by_size() -> None:
    by_number = make_kv_pool(FULL, CacheSettings(page_size=16, num_pages=5), torch.float32, CPU)
    assert by_number.num_pages == 5
    assert by_number.full.page_size_bytes == 3 * LAYER_BYTES
    assert by_number.full.page_size_bytes * 5 == by_number.full.kv_LJKSD.nbytes
    assert by_number.window is None
    assert by_number.layout.window is None
    size = by_number.full.page_size_bytes * 7 + 100
    by_size = make_kv_pool(FULL, CacheSettings(page_size=16, size_bytes=size), torch.float32, CPU)
    assert by_size.num_pages == 7


def test_windowed_layers_have_a_pool_of_their_own() -> None:
    settings = CacheSettings(page_size=16, num_pages=8, window_ratio=0.5)
    pool = make_kv_pool(MIXED, settings, torch.float32, CPU)
    assert pool.window is not None
    assert (pool.num_pages, pool.window.num_pages, pool.layout.window) == (8, 4, 64)
    assert (pool.full.page_size_bytes, pool.window.page_size_bytes) == (LAYER_BYTES, 2 * LAYER_BYTES)
    assert pool.places == ((pool.window, 0), (pool.full, 0), (pool.window, 1))
    pool.layer(2)[17, 1, 0] = 3.0
    assert (pool.window.kv_LJKSD[1, 1, 0, 17] == 3.0).all()


def test_both_pools_share_the_size() -> None:
    settings = CacheSettings(page_size=16, size_bytes=10 * 3 * LAYER_BYTES, window_ratio=0.25)
    pool = make_kv_pool(MIXED, settings, torch.float32, CPU, draft_page_bytes=LAYER_BYTES // 2)
    assert pool.window is not None
    assert pool.num_pages == 15, (
        "a page costs a full layer, a quarter of two window layers, half a draft layer"
    )
    assert pool.window.num_pages == 4


def test_without_full_layers_pages_still_count() -> None:
    pool = make_kv_pool(KVLayout(2, 8, (4, 4)), CacheSettings(16, 6), torch.float32, CPU)
    assert (pool.num_pages, pool.full.page_size_bytes) == (6, 0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [(CacheSettings(16, size_bytes=2**50), "cache.size_mib"), (CacheSettings(16, 2**40), "cache.num_pages")],
)
def test_larger_than_the_machine(settings: CacheSettings, named: str) -> None:
    with pytest.raises(MemoryShort, match=rf"the KV pool takes .* MiB; cpu has [\d,]+ MiB free \({named}\)"):
        make_kv_pool(FULL, settings, torch.float32, CPU)


def test_too_small() -> None:
    with pytest.raises(PoolTooSmall, match="cache has 100"):
        make_kv_pool(FULL, CacheSettings(page_size=16, size_bytes=100), torch.float32, CPU)
