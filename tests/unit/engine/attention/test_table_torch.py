"""Attention over tables with torch's operators, against the reference: padding, dead slots, and what is written
where."""

from __future__ import annotations

import pytest
import torch
from table_scene import Padding, TableScene

from engine.attention.interface import AttentionTables, AttentionUnavailable, LayerTraits
from engine.attention.table_torch import TorchTables
from engine.runner.kv_pool import KVLayout, make_kv_pool
from engine.settings import CacheSettings

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["plain", "cap and sinks"])
@pytest.mark.parametrize("most_queries", [1, 40], ids=["decode", "mixed"])
@pytest.mark.parametrize("padding", [Padding(), Padding(3, 0), Padding(0, 2), Padding(2, 5)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_equals_the_reference(page_size: int, padding: Padding, most_queries: int, kind: str) -> None:
    for seed in range(3):
        scene = TableScene(seed, page_size, most_queries, torch.float32)
        expected = scene.expected(scene.traits(kind))
        got = scene.got(TorchTables, scene.traits(kind), padding)
        for one, other in zip(expected.outputs, got.outputs, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(other, one, atol=2e-5, rtol=2e-5, msg=f"seed {seed}")
        torch.testing.assert_close(got.pools, expected.pools, equal_nan=True, atol=0, rtol=0)


def test_rows_of_one_pool_may_go_nowhere() -> None:
    pool = make_kv_pool(KVLayout(1, 8, (None, 2)), CacheSettings(1, 4, window_ratio=1.0), torch.float32, CPU)
    assert pool.window is not None
    for paged in (pool.full, pool.window):
        paged.kv_LJKSD.zero_()
    slots_PN = (torch.tensor([2, 0, 3]), torch.tensor([-1, 1, 2]))
    tables = AttentionTables(
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([3], dtype=torch.int32),
        (torch.tensor([[2, 0, 3]], dtype=torch.int32), torch.tensor([[0, 1, 2]], dtype=torch.int32)),
        slots_PN,
        3,
        3,
    )
    step = TorchTables(pool).plan(tables)
    for layer in (0, 1):
        kv_NJKD = torch.arange(1.0, 4.0)[:, None, None, None].expand(3, 2, 1, 8)
        step(layer, torch.zeros(3, 1, 8), kv_NJKD, LayerTraits(1.0, (None, 2)[layer]))
    assert pool.layer(0)[:, 0, 0, 0].tolist() == [2, 0, 1, 3]
    assert pool.layer(1)[:, 0, 0, 0].tolist() == [0, 2, 3, 0]


def test_a_step_of_padding_alone_writes_nothing() -> None:
    pool = make_kv_pool(KVLayout(2, 8, (None,)), CacheSettings(1, 4), torch.float32, CPU)
    pool.full.kv_LJKSD.fill_(7.0)
    tables = AttentionTables(
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        (torch.full((2, 4), -1, dtype=torch.int32),),
        (torch.full((5,), -1),),
        1,
        1,
    )
    out_NA = TorchTables(pool).plan(tables)(0, torch.ones(5, 4, 8), torch.ones(5, 2, 2, 8), LayerTraits(1.0))
    assert out_NA.shape == (5, 32)
    assert out_NA.isfinite().all()
    assert (pool.full.kv_LJKSD == 7.0).all()


def test_it_is_not_captured_and_has_no_fp8() -> None:
    layout = KVLayout(2, 8, (None,))
    pool = make_kv_pool(layout, CacheSettings(1, 4), torch.float32, CPU)
    assert not TorchTables(pool).captures(1)
    with pytest.raises(AttentionUnavailable, match="no fp8 KV; triton has"):
        TorchTables(make_kv_pool(layout, CacheSettings(1, 4, kv_dtype="fp8"), torch.float32, CPU))
