"""With `deterministic` Triton's attention gives a query the same bits, whatever else a step holds: on a GPU. Triton's
interpreter multiplies with numpy, whose sums depend on the sizes of tiles, so there results are close."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.bits_trial import check_bits
from engine.attention.interface import AttentionUnavailable, LayerTraits, Queries
from engine.attention.tables import ItemAttention
from engine.attention.tiles import AttentionTiles, TileShape
from engine.attention.triton_backend import TritonAttention
from engine.runner.kv_pool import KVLayout, KVPool, make_kv_pool
from engine.settings import CacheSettings
from tests.unit.engine.attention.chunked_sequences import ChunkedSequences
from tests.unit.engine.attention.stage import DEVICE, Shape, make_stage, memory_of_nan

pytestmark = pytest.mark.slow

ON_GPU = DEVICE.type == "cuda"
SMALL_TILES = AttentionTiles((TileShape(16, 16, 4, 2, 2), TileShape(32, 16, 4, 2, 2)), every_split=32)
"""For the interpreter: a few tokens make several tiles and splits."""

LENGTHS = (1700, 9, 600, 70) if ON_GPU else (75, 9, 40)
"""Of sequences that are attended to together."""


def check(shape: Shape, multiprocessors: int = 64) -> TritonAttention:
    """Compares with the reference in float64."""
    expected, stage = make_stage(shape, 0).expected(), make_stage(shape, 0)
    with memory_of_nan():
        attention = TritonAttention(stage.pool, SMALL_TILES, multiprocessors)
    tolerance = 2e-5 if shape.dtype == torch.float32 else 3e-2
    got = stage.got(attention)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    assert not attention.counters.any(), "the next step would merge too early"
    return attention


MIXED = ((1, 75), (5, 40), (1, 1), (18, 18))


@pytest.mark.parametrize(
    ("window", "multiprocessors"), [(None, 1), (None, 5), (None, 64), (1, 64), (17, 5), (100, 64)]
)
def test_splits_of_one_length_change_nothing(window: int | None, multiprocessors: int) -> None:
    attention = check(Shape(MIXED, kv_heads=1, window=window, sinks=window == 17), multiprocessors)
    assert attention.sums.isnan().all() == (multiprocessors == 1), "it was split, or it was not"


@pytest.mark.parametrize("sinks", [False, True])
def test_scores_and_padding(sinks: bool) -> None:
    check(Shape(((1, 70), (5, 30)), kv_heads=1, scale=-0.2, softcap=1.5, sinks=sinks))
    check(Shape(((1, 64), (12, 96)), group=4, sinks=sinks, padding_items=3, padding_rows=20, spare_pages=40))
    fp8 = Shape(((1, 70), (5, 40)), 16, window=30, sinks=sinks, dtype=torch.bfloat16, fp8=True)
    check(fp8)


@pytest.mark.parametrize("window", [None, 20])
def test_the_bits_are_tried(window: int | None) -> None:
    """Bits on a GPU; in the interpreter the same steps, of which one is then made to differ."""
    windows = (None,) if window is None else (None, window)
    pool = make_kv_pool(
        KVLayout(1, 16, windows), CacheSettings(16, 4, window_ratio=1.0), torch.float32, DEVICE
    )
    queries = Queries(2, torch.float32)
    if ON_GPU:
        check_bits(pool, queries)
        return
    steps = (((1, 1), (1, 33)), ((3, 34), (9, 40)))[: 2 if window is None else 1]

    def small(pool: KVPool, multiprocessors: int | None) -> TritonAttention:
        return TritonAttention(pool, SMALL_TILES, multiprocessors or 64)

    compared = []

    def close(one: Tensor, other: Tensor) -> bool:
        compared.append(one.shape[0])
        return torch.allclose(one, other, atol=1e-5, rtol=1e-5)

    check_bits(pool, queries, small, steps, close)
    assert len(compared) == (2 * 4 if window is None else 2 * 2 * 2)
    with pytest.raises(AttentionUnavailable, match=r"other bits in another step \(1 of 1 tokens\)"):
        check_bits(pool, queries, small, steps, lambda _one, _other: False)

    def broken(_pool: KVPool, _multiprocessors: int | None) -> TritonAttention:
        raise RuntimeError("out of resource")

    with pytest.raises(
        AttentionUnavailable, match="bits could not be compared: RuntimeError: out of resource"
    ):
        check_bits(pool, queries, broken)


def test_one_width_of_blocks() -> None:
    shapes = TileShape(16, 16, 4, 2, 8), TileShape(32, 32, 4, 2, 4)
    with pytest.raises(ValueError, match="need one block_n"):
        AttentionTiles(shapes, every_split=64)
    with pytest.raises(ValueError, match="splits of 40 tokens"):
        AttentionTiles(shapes[:1], every_split=40)


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    fp8: bool = False


HEADS = (
    (
        Heads(32, 8, 128, torch.bfloat16),
        Heads(8, 8, 64, torch.float16),
        Heads(40, 8, 128, torch.bfloat16, fp8=True),
        Heads(6, 2, 72, torch.float32),
        Heads(4, 2, 256, torch.bfloat16),
    )
    if ON_GPU
    else (Heads(4, 2, 16, torch.float32),)
)


TRAITS = (
    (LayerTraits(0.1), LayerTraits(0.1, 100), LayerTraits(0.1, None, 20.0))
    if ON_GPU
    else (LayerTraits(0.1), LayerTraits(0.1, 30, 20.0))
)


@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_a_query_has_the_same_bits_in_every_step(shape: Heads, traits: LayerTraits) -> None:
    random = np.random.default_rng(shape.dim)
    layout = KVLayout(shape.kv_heads, shape.dim, (None,))
    traits = replace(traits, sinks_H=torch.randn(shape.heads).to(DEVICE))
    sequences = ChunkedSequences(
        LENGTHS, shape.heads, layout, traits, shape.dtype, DEVICE, "fp8" if shape.fp8 else "auto"
    )

    def make(pool: KVPool, multiprocessors: int | None = None) -> ItemAttention:
        tiles = None if ON_GPU else SMALL_TILES
        return ItemAttention(TritonAttention(pool, tiles, multiprocessors, deterministic=True), DEVICE)

    expected = sequences.alone(make, 16)
    assert all(each.isfinite().all() for each in expected)
    for page_size, most, multiprocessors in ((1, 200, 3), (16, 30, None), (256, 700, 1))[
        : 3 if ON_GPU else 2
    ]:
        got = sequences.in_chunks(
            partial(make, multiprocessors=multiprocessors), page_size, most, random, max(LENGTHS)
        )
        for length, one, other in zip(LENGTHS, got, expected, strict=True):
            where = f"pages of {page_size}, at most {most} tokens, sequence of {length}"
            if ON_GPU:
                assert torch.equal(one, other), f"{where}: {(one != other).float().mean():.2%} differ"
            else:
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=where)
