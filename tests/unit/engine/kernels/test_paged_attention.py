"""The Triton kernels against the reference in float64, on a GPU if there is one, else in Triton's interpreter.

Whatever may not be read is NaN: dead slots and their scales, tokens before the window, padding, and memory of
results.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.attention import triton_backend
from engine.attention.tiles import AttentionTiles, TileShape
from engine.attention.triton_backend import TritonAttention
from tests.unit.engine.attention.stage import DEVICE, Shape, make_stage, memory_of_nan

SMALL_TILES = AttentionTiles((TileShape(16, 16, 4, 2, 8), TileShape(32, 16, 4, 2, 4)), 32, 4)
"""Small tiles, so that a few tokens make several tiles, blocks and splits."""

ONE_SPLIT = replace(SMALL_TILES, max_splits=1)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXED = ((1, 75), (5, 40), (1, 1), (18, 18), (1, 120))
"""Decodes, and extends with and without history."""


def check(
    shape: Shape, seed: int = 0, tiles: AttentionTiles = SMALL_TILES, multiprocessors: int = 64
) -> TritonAttention:
    """Compares the kernels with the reference. By default there are so many multiprocessors that everything that can be
    split is split."""
    expected = make_stage(shape, seed).expected()
    stage = make_stage(shape, seed)
    with memory_of_nan():
        attention = TritonAttention(stage.pool, tiles, multiprocessors)
    tolerance = TOLERANCES[torch.bfloat16 if shape.fp8 and shape.dtype == torch.float16 else shape.dtype]
    for layer, (want, got) in enumerate(zip(expected, stage.got(attention), strict=True)):
        assert want.isfinite().all(), "the test's own reference read what it must not"
        where = f"layer {layer} of {shape}"
        assert torch.allclose(got, want, atol=tolerance, rtol=tolerance), (
            f"{where}: {(got - want).abs().max()}"
        )
    assert not attention.counters.any(), "the next step would join too early"
    return attention


@pytest.mark.parametrize("page_size", [1, 3, 16, 17, 256])
def test_page_sizes(page_size: int) -> None:
    check(Shape(MIXED, page_size, kv_heads=1, window=23))


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (2, 3), (1, 7), (1, 16), (2, 20), (1, 71)])
def test_shared_key_heads(kv_heads: int, group: int) -> None:
    check(Shape(((1, 40), (6, 21), (2, 3)), kv_heads=kv_heads, group=group))
    check(Shape(((1, 40), (1, 21), (1, 1)), kv_heads=kv_heads, group=group))


@pytest.mark.parametrize("dim", [8, 16, 32, 64, 80, 96, 112, 128, 160, 192, 256])
def test_head_sizes(dim: int) -> None:
    check(Shape(((3, 70), (1, 9)), page_size=16, kv_heads=1, dim=dim, scale=dim**-0.5, window=40))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 100])
def test_windows(window: int) -> None:
    check(Shape(MIXED, kv_heads=1, window=window, sinks=window % 2 == 1))
    check(Shape(((1, 90), (1, 33), (1, 2)), 16, kv_heads=1, window=window), tiles=ONE_SPLIT)


@pytest.mark.parametrize("softcap", [None, 1.5, 30.0])
@pytest.mark.parametrize("scale", [0.3, -0.2, 0.0])
def test_scores(scale: float, softcap: float | None) -> None:
    """Every scale and every cap is there with sinks and without them."""
    sinks = (scale > 0) == (softcap is None)
    check(Shape(((1, 70), (5, 30)), kv_heads=1, scale=scale, softcap=softcap, sinks=sinks))


def test_a_sink_of_no_weight() -> None:
    shape = Shape(((1, 70), (5, 50)), sinks=True)
    stage, bare = make_stage(shape, 3), make_stage(replace(shape, sinks=False), 3)
    assert stage.sinks is not None
    stage.sinks.fill_(-torch.inf)
    bare.q, bare.kv = stage.q, stage.kv
    got = stage.got(TritonAttention(stage.pool, SMALL_TILES, 64))
    torch.testing.assert_close(got, bare.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, fp8: bool) -> None:
    if fp8 and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no float8_e4m3fn here")
    for page_size in (5, 16):
        check(Shape(((1, 70), (5, 40)), page_size, 1, window=30, sinks=True, dtype=dtype, fp8=fp8))


@pytest.mark.parametrize("factor", [2.0**30, 2.0**-30])
def test_queries_beyond_float16_over_fp8(factor: float) -> None:
    """The products of queries with fp8 keys are in float16. One row is all zeros."""
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("Triton has no float8_e4m3fn here")
    shape = Shape(((1, 70), (5, 40)), scale=0.3 / factor, dtype=torch.bfloat16, fp8=True)
    expected, stage = make_stage(shape, 5), make_stage(shape, 5)
    for each in (expected, stage):
        each.q *= factor
        each.q[2] = 0.0
    (want,), (got,) = expected.expected(), stage.got(TritonAttention(stage.pool, SMALL_TILES, 64))
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("new", [2, 3, 4, 8])
def test_verifies(new: int) -> None:
    check(Shape(((new, 60), (new, new), (new, 80)), kv_heads=1, group=4))


def test_chunks_of_one_prompt() -> None:
    for new, total in ((40, 40), (40, 80), (17, 97), (1, 98)):
        check(Shape(((new, total),), 16, kv_heads=1, window=50))


@pytest.mark.parametrize("items", [((1, 20), (1, 90)), ((1, 20), (12, 90))])
def test_padding(items: tuple[tuple[int, int], ...]) -> None:
    check(Shape(items, padding_items=3, padding_rows=20, spare_pages=40))


def test_splits_are_used_and_change_nothing() -> None:
    """Long and short contexts side by side. Short ones are not split, long ones according to their length."""
    shape = Shape(((1, 290), (1, 7), (3, 160)), page_size=16, sinks=True)
    attention = check(shape)
    assert not attention.sums.isnan().all(), "nothing was split"
    assert attention.sums.isnan().any(), "the workspace is larger than what was split"
    assert check(shape, tiles=ONE_SPLIT).sums.isnan().all()


@pytest.mark.parametrize("multiprocessors", [1, 2, 5, 13])
def test_every_part_has_a_program(multiprocessors: int) -> None:
    """From a card without room for splits to one with room for some. Decodes have padding where mixed steps have none,
    and the other way round."""
    decodes, mixed = ((1, 290), (1, 7), (1, 160)), ((1, 290), (40, 60), (16, 160), (3, 9))
    for items, pads in ((decodes, multiprocessors in (2, 13)), (mixed, multiprocessors in (1, 5))):
        padding = 5 * pads
        check(Shape(items, 16, padding_items=padding, padding_rows=padding), multiprocessors=multiprocessors)


@pytest.mark.parametrize("items", [((5, 290),), ((5, 290), (1, 70), (3, 200))])
def test_padding_takes_no_splits_from_what_is_alive(items: tuple[tuple[int, int], ...]) -> None:
    """A captured step has room for as many items as rows. Here some items have a few new tokens after a long
    history."""
    shape = Shape(items, page_size=16, padding_items=40, padding_rows=40)
    stage = make_stage(shape, 2)
    expected, stage = stage.expected(), make_stage(shape, 2)
    tables = replace(stage.tables(), max_query_len=shape.rows + shape.padding_rows)
    with memory_of_nan():
        attention = TritonAttention(stage.pool, SMALL_TILES, multiprocessors=16)
    got = stage.got(attention, tables)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    assert not attention.sums.isnan().all(), "nothing was split"
    assert not attention.counters.any()


def test_tables_may_hold_other_contents() -> None:
    """As when a graph is replayed, tensors and launches stay the same, while contexts, items and padding change."""
    few = Shape(((1, 20), (1, 150)), padding_items=2, padding_rows=2, spare_pages=41)
    steps = [few, Shape(((1, 120), (1, 7), (1, 33), (1, 64)), spare_pages=41), few]
    wide = replace(few, items=((1, 150),) * 4, padding_items=0, padding_rows=0)
    stages = [make_stage(wide, 9)] + [make_stage(shape, seed) for seed, shape in enumerate(steps)]
    tables = stages[0].tables()
    attention = TritonAttention(stages[0].pool, SMALL_TILES, 64)
    for stage in stages[1:]:
        fresh = stage.tables()
        tables.query_starts_B1.copy_(fresh.query_starts_B1)
        tables.kv_lens_B.copy_(fresh.kv_lens_B)
        tables.slots_PN[0].copy_(fresh.slots_PN[0])
        width = fresh.pages_PBM[0].shape[1]
        tables.pages_PBM[0].fill_(-1)[:, :width].copy_(fresh.pages_PBM[0][:, : tables.pages_PBM[0].shape[1]])
        kv_LJKSD = stage.pool.full.kv_LJKSD
        stages[0].pool.full.kv_LJKSD[:, :, :, : kv_LJKSD.shape[3]].copy_(kv_LJKSD)
        got = stage.got(attention, tables)
        torch.testing.assert_close(got, stage.expected(), atol=2e-5, rtol=2e-5)


def test_offsets_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "WIDE_ELEMENTS", 1)
    for page_size in (5, 16):
        check(Shape(((1, 70), (5, 40)), page_size, kv_heads=1, window=30))


def random_shape(choose: random.Random) -> Shape:
    totals = [choose.randint(1, choose.choice([8, 60, 120])) for _ in range(choose.randint(1, 4))]
    longest = choose.choice([1, 1, 5, 30])
    return Shape(
        tuple((choose.randint(1, min(total, longest)), total) for total in totals),
        page_size=choose.choice([1, 2, 7, 16, 32, 48]),
        kv_heads=choose.randint(1, 2),
        group=choose.choice([1, 2, 3, 5, 8]),
        dim=choose.choice([8, 16, 24, 40, 64]),
        window=choose.choice([None, choose.randint(1, 100)]),
        softcap=choose.choice([None, None, 5.0]),
        sinks=choose.random() < 0.3,
        scale=choose.uniform(0.05, 0.5),
        fp8=choose.random() < 0.2 and (DEVICE.type == "cpu" or torch.cuda.get_device_capability() >= (8, 9)),
        padding_items=choose.choice([0, 0, 3]),
        padding_rows=choose.choice([0, 0, 9]),
    )


@pytest.mark.parametrize("seed", range(6 if DEVICE.type == "cpu" else 60))
def test_any_step(seed: int) -> None:
    """The test's parameter is the seed."""
    choose = random.Random(seed)
    size = choose.choice([16, 32])
    tiles = AttentionTiles(
        (TileShape(16, size, 4, 2, 8), TileShape(32, 16, 4, 2, 4)),
        choose.choice([16, 48]),
        choose.choice([1, 4, 8]),
    )
    check(random_shape(choose), seed, tiles)
