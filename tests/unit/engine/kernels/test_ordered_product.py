"""Products that are summed in one order, against float64, and that a row has the same bits beside any others. Triton's
interpreter multiplies with numpy, whose sums depend on the sizes of tiles: bits are compared on a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from engine.kernels.ordered_product import OrderedTiles, multiply_in_order
from engine.models.ordered_linear import FLOAT32_TILES, MOST_GATED_SUMS, TILES
from tests.unit.engine.kernels.rounding import ROUNDING, assert_rounded_once
from tests.unit.engine.kernels.test_few_rows import draw, surrounded

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TINY = OrderedTiles(16, 16, 16, 1, 2)


@pytest.mark.parametrize("seed", range(12))
def test_any_product(device: torch.device, seed: int) -> None:
    """Sizes are odd, and the memory around rows and weights is NaN. The test's parameter is the seed."""
    choose = random.Random(seed)
    dtype = choose.choice(list(ROUNDING))
    rows, outputs, inputs = choose.randint(1, 70), choose.randint(1, 150), choose.randint(1, 200)
    x_NI, weight_OI, bias_O = draw(device, dtype, rows, outputs, inputs, seed)
    x_NI, weight_OI = surrounded(x_NI, 3), surrounded(weight_OI, choose.randint(0, 5))
    tiles = replace(TINY, block_n=choose.choice((16, 32)), block_o=choose.choice((16, 64)))
    biased = choose.random() < 0.5
    got_NO = multiply_in_order(x_NI, weight_OI, bias_O if biased else None, tiles)
    wide_NO = x_NI.double() @ weight_OI.double().t() + biased * bias_O.double()
    scale_NO = x_NI.double().abs() @ weight_OI.double().abs().t() + biased * bias_O.double().abs()
    assert got_NO.is_contiguous()
    assert_rounded_once(got_NO, wide_NO, scale_NO)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_and_its_activation(device: torch.device, dtype: torch.dtype, biased: bool) -> None:
    x_NI, weight_OI, bias_O = draw(device, dtype, 21, 2 * 45, 64, 7)
    got_NF = multiply_in_order(x_NI, weight_OI, bias_O if biased else None, TINY, gated=True)
    gate_NF, up_NF = (x_NI.double() @ weight_OI.double().t() + biased * bias_O.double()).chunk(2, 1)
    atol, rtol = (1e-4, 1e-4) if dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close(got_NF.double(), silu(gate_NF) * up_NF, atol=atol, rtol=rtol)


def test_of_nothing(device: torch.device) -> None:
    assert multiply_in_order(
        torch.empty(0, 8, device=device), torch.ones(5, 8, device=device), None, TINY
    ).shape == (
        0,
        5,
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_all_tiles_give_a_row_the_same_bits(dtype: torch.dtype, gated: bool) -> None:
    """1,000 inputs are no multiple of a block."""
    device = torch.device("cuda", 0)
    for inputs in (1024, 1000):
        x_NI, weight_OI, bias_O = draw(device, dtype, 700, 384, inputs, 3)
        expected_NO = None
        for tiles in FLOAT32_TILES if dtype == torch.float32 else TILES:
            if gated and tiles.sums_of_thread > MOST_GATED_SUMS:
                continue
            for rows in (700, 1, 7, 64, 65, 300):
                got_NO = multiply_in_order(x_NI[:rows], weight_OI, bias_O, tiles, gated=gated)
                expected_NO = got_NO if expected_NO is None else expected_NO
                assert torch.equal(got_NO, expected_NO[:rows]), (tiles, rows, inputs)
