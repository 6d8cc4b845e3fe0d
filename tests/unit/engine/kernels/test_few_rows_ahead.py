"""Products of few rows, compiled for cards that need not be here. Nothing spills, weights are loaded 16 bytes at a time
past the registers, and enough of them is under way."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from engine.kernels.few_rows import TILES, RowTiles
from engine.kernels.gated_rows import GATED_TILES
from tests.unit.engine.kernels.ahead_of_time import MOST_SPILLED, Build, Compiler, Report

MULTIPROCESSORS = 132
SHARED_BYTES = 228 * 1024
"""The shared memory of a multiprocessor of sm_90. Each block takes a KB besides its own."""

NEEDED_BYTES = 26 * 1024
"""The bytes that must be under way to a multiprocessor of an H200 at any time: 4.8 TB/s for 700 ns."""

OUTPUTS = {16: 2112, 32: 4096, 64: 28672}
"""By the outputs of a tile: how many outputs a matrix has that such tiles are meant for."""


def product(tiles: RowTiles, dtype: str, capability: int, block_n: int, has_bias: bool) -> Build:
    pointers = ("x_NI", "weight_OI", "bias_O", "out_NO")
    sizes = ("outputs", "inputs", "x_stride", "weight_stride")
    return Build(
        "engine.kernels.few_rows:multiply_rows",
        dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(("rows", *sizes), "i32"),
        {
            "BLOCK_N": block_n,
            "BLOCK_O": tiles.block_o,
            "BLOCK_I": tiles.block_i,
            "COMPUTE": {"bf16": "tl.bfloat16", "fp16": "tl.float16"}[dtype],
            "HAS_BIAS": has_bias,
            "EARLY": capability >= 90,
        },
        capability,
        pointers + sizes,
        tiles.num_warps,
        tiles.num_stages,
        texts=True,
    )


def gated(tiles: RowTiles, dtype: str, capability: int, block_n: int) -> Build:
    """multiply_gated_rows has the same arguments, but for the size of a half."""
    like = product(tiles, dtype, capability, block_n, has_bias=block_n == 16)
    names = {"outputs": "size", "out_NO": "out_NF"}
    return replace(
        like,
        kernel="engine.kernels.gated_rows:multiply_gated_rows",
        signature={names.get(name, name): kind for name, kind in like.signature.items()},
        divisible=[names.get(name, name) for name in like.divisible],
    )


CASES = [
    (tiles, product(tiles, dtype, capability, block_n, has_bias=block_n == 16))
    for tiles, (dtype, capability), block_n in itertools.product(TILES, (("fp16", 80), ("bf16", 90)), (8, 16))
]


@pytest.fixture(scope="module")
def reports(compiler: Compiler) -> list[tuple[RowTiles, Build, Report]]:
    built = compiler.build([one for _, one in CASES])
    return [(tiles, one, report) for (tiles, one), report in zip(CASES, built, strict=True)]


def test_nothing_spills(reports: list[tuple[RowTiles, Build, Report]]) -> None:
    for _, one, report in reports:
        assert report.spilled_bytes <= MOST_SPILLED, one
        assert report.fits(89), one  # this card has the least shared memory of all
        assert report.registers <= 128, one


def test_weights_are_copied_16_bytes_at_a_time(reports: list[tuple[RowTiles, Build, Report]]) -> None:
    """Rows of input are small and may come in halves of that. Neither weights nor rows go through registers."""
    for tiles, one, report in reports:
        copies = re.findall(r"\bLDGSTS(?:\.[A-Z]+)*\.E(?:\.[A-Z]\w*)*(\.128|\.64|)", report.sass)
        weights = tiles.block_o * 2 * tiles.block_i * 2 // (16 * 32 * tiles.num_warps)
        assert copies.count(".128") >= tiles.num_stages * weights, (one, copies)
        assert "" not in copies, one
        assert re.search(r"\bH(G?)MMA\b", report.sass), one
        loads = re.findall(r"\bLDG\.\S+", report.sass)
        assert len(loads) <= (2 if one.constants["HAS_BIAS"] else 0), (one, loads)


def test_gated_rows_neither_spill_nor_leave_the_copies(compiler: Compiler) -> None:
    cases = [
        gated(tiles, dtype, capability, block_n)
        for tiles, (dtype, capability), block_n in itertools.product(
            GATED_TILES, (("fp16", 80), ("bf16", 90)), (8, 16)
        )
    ]
    for one, report in zip(cases, compiler.build(cases), strict=True):
        assert report.spilled_bytes <= MOST_SPILLED, one
        assert report.fits(one.capability), one
        assert re.search(r"\bLDGSTS\S*\.128", report.sass), one
        assert re.search(r"\bH(G?)MMA\b", report.sass), one
        assert ("griddepcontrol" in report.ptx) == (one.capability >= 90), one


def test_enough_is_on_its_way(reports: list[tuple[RowTiles, Build, Report]]) -> None:
    """The minimum that is under way: while a block is multiplied, all stages but it and one more."""
    for tiles, one, report in reports:
        if one.capability != 90:
            continue
        fit = SHARED_BYTES // (report.shared_bytes + 1024)
        programs = min(fit, -(-OUTPUTS[tiles.block_o] // tiles.block_o) // MULTIPROCESSORS or 1)
        ahead_bytes = (tiles.num_stages - 2) * tiles.block_o * 2 * tiles.block_i * 2
        assert programs * ahead_bytes >= 0.9 * NEEDED_BYTES, (one, report)
