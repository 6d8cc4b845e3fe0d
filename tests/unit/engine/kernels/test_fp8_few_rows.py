"""Products of few rows with weights held in fp8, without the matrix units, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.kernels.fp8_few_rows import EACH, ROW_TILES, Fp8RowTiles, multiply_fp8_sums, sums_fit
from tests.unit.engine.kernels.ahead_of_time import MOST_SPILLED, Build, Compiler
from tests.unit.engine.kernels.rounding import crossed
from tests.unit.engine.kernels.test_fp8_rows import check, draw, every_number

TINY = Fp8RowTiles(2, 1)
"""It takes a row of 1,040 inputs in three turns."""


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("rows", "columns", "tiles", "dtype"), crossed([(1, 1040), (1, 128), (3, 48)], [*ROW_TILES, TINY])
)
def test_against_float64(
    device: torch.device, rows: int, columns: int, tiles: Fp8RowTiles, dtype: torch.dtype
) -> None:
    matrix = draw(device, 75, 1040, columns)
    x_NI = torch.randn(rows, 1040).to(device, dtype)
    bias_O = torch.randn(75).to(device, dtype) if rows > 1 else None
    check(x_NI, matrix, bias_O, partial(multiply_fp8_sums, tiles=tiles))


@pytest.mark.parametrize(("tiles", "dtype"), crossed([()], ROW_TILES))
def test_every_number_has_its_place(device: torch.device, tiles: Fp8RowTiles, dtype: torch.dtype) -> None:
    """A row of x with a one for each weight, so a number at another place would be seen."""
    diagonal_OI, expected_O = every_number(device)
    ones_OB = torch.ones(256, 1, device=device)
    x_NI = torch.ones(1, 256, dtype=dtype, device=device)
    got_NO = multiply_fp8_sums(x_NI, diagonal_OI, ones_OB, 256, None, tiles)
    assert torch.equal(got_NO[0].float(), expected_O)
    powers_I = torch.exp2(torch.arange(256, device=device) % 4)
    got_NO = multiply_fp8_sums(powers_I.to(dtype)[None], diagonal_OI, ones_OB, 256, None, tiles)
    assert torch.equal(got_NO[0].float(), expected_O * powers_I)


def test_of_no_rows(device: torch.device) -> None:
    matrix = draw(device, 5, 32, 32)
    x_NI = torch.empty(0, 32, device=device)
    assert multiply_fp8_sums(x_NI, matrix.values_OI, matrix.scales_OB, 32, None, TINY).shape == (0, 5)


def test_what_fits() -> None:
    assert sums_fit(48, 7, 1)
    assert sums_fit(96, 48, 2)
    assert not sums_fit(96, 24, 4)
    assert not sums_fit(40, 40, 1)


def build(tiles: Fp8RowTiles, capability: int, *, one_block: bool) -> Build:
    sizes = ("outputs", "inputs", "blocks", "columns", "x_stride", "words_stride")
    rows = ("x_NI", "bias_O", "out_NO")
    return Build(
        "engine.kernels.fp8_few_rows:sum_row",
        dict.fromkeys(rows, "*bf16")
        | {"words_OW": "*i32", "scales_OB": "*fp32"}
        | dict.fromkeys(sizes, "i32"),
        {
            "BLOCK_O": tiles.block_o,
            "PARTS": 32 * tiles.num_warps,
            "EACH": EACH,
            "ONE_BLOCK": one_block,
            "HAS_BIAS": False,
            "EARLY": capability >= 90,
        },
        capability,
        (*rows, "words_OW", "scales_OB", "outputs", "inputs", "columns", "x_stride", "words_stride"),
        tiles.num_warps,
        texts=True,
    )


def test_a_weight_takes_few_instructions(compiler: Compiler) -> None:
    """Weights come 16 bytes at a time, and are made float16 two at a time; nothing brings bytes into another order."""
    cases = [
        (tiles.block_o * EACH, build(tiles, capability, one_block=one_block))
        for tiles in ROW_TILES
        for capability, one_block in ((89, True), (90, True), (90, False))
    ]
    reports = compiler.build([one for _, one in cases])
    for (weights, one), report in zip(cases, reports, strict=True):
        assert report.spilled_bytes <= MOST_SPILLED, one
        assert report.registers <= 128, one
        assert report.sass.count("F2FP.F16.E4M3.UNPACK_B") == weights // 2, one
        assert report.sass.count("LDG.E.128") >= weights // 16, one
        assert report.sass.count("PRMT") < weights // 2, one
        assert ("griddepcontrol" in report.ptx) == (one.capability >= 90), one
