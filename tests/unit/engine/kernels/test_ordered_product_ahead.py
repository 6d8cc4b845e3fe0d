"""Products in one order, compiled for cards that need not be here: nothing spills, shared memory suffices, and the
matrix units multiply."""

from __future__ import annotations

import re

import pytest

from engine.kernels.ordered_product import BAND, OrderedTiles
from engine.models.ordered_linear import FLOAT32_TILES, MOST_GATED_SUMS, TILES
from tests.unit.engine.kernels.ahead_of_time import MOST_SPILLED, Build, Compiler

pytestmark = pytest.mark.slow


def product(tiles: OrderedTiles, dtype: str, capability: int, *, gated: bool) -> Build:
    pointers = ("x_NI", "weight_OI", "bias_O", "out_NO")
    sizes = ("outputs", "inputs", "x_stride", "weight_stride")
    return Build(
        "engine.kernels.ordered_product:multiply_ordered",
        dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(("rows", *sizes), "i32"),
        {
            "BLOCK_N": tiles.block_n,
            "BLOCK_O": tiles.block_o,
            "BLOCK_I": tiles.block_i,
            "BAND": BAND,
            "COMPUTE": {"bf16": "tl.bfloat16", "fp32": "tl.float32"}[dtype],
            "WHOLE": True,
            "GATED": gated,
            "HAS_BIAS": False,
            "EARLY": capability >= 90,
        },
        capability,
        pointers + sizes,
        tiles.num_warps,
        tiles.num_stages,
        texts=True,
    )


def test_tiles_of_hopper(compiler: Compiler) -> None:
    """Those that are for gates too, with both matrices."""
    builds = [product(tiles, "bf16", 90, gated=tiles.sums_of_thread <= MOST_GATED_SUMS) for tiles in TILES]
    for one, report in zip(builds, compiler.build(builds), strict=True):
        assert report.spilled_bytes <= MOST_SPILLED, one
        assert report.fits(90), one
        assert re.search(r"\bH(G?)MMA\b", report.sass), one


def test_the_first_tiles_fit_every_card(compiler: Compiler) -> None:
    builds = [product(TILES[0], "bf16", 80, gated=gated) for gated in (False, True)]
    builds += [product(tiles, "fp32", 80, gated=gated) for tiles in FLOAT32_TILES for gated in (False, True)]
    for one, report in zip(builds, compiler.build(builds), strict=True):
        assert report.spilled_bytes <= MOST_SPILLED, one
        assert report.fits(89), one
