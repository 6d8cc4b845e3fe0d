"""The gated half of an MLP for few rows against float64. The memory around rows and weights is NaN."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.kernels.few_rows import MOST_ROWS, RowTiles
from engine.kernels.gated_rows import GATED_TILES, GatedFewRows, multiply_gated
from tests.unit.engine.kernels.rounding import ROUNDING
from tests.unit.engine.kernels.test_few_rows import draw, surrounded

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TINY = RowTiles(16, 16, 1, 2)


def expected(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    both_NO = x_NI.double() @ weight_OI.double().t()
    if bias_O is not None:
        both_NO += bias_O.double()
    gate_NF, up_NF = both_NO.chunk(2, 1)
    return torch.nn.functional.silu(gate_NF) * up_NF


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("seed", range(10))
def test_any_size(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    """Sizes are odd, some smaller than a block, and rows begin anywhere. The test's parameter is the seed."""
    choose = random.Random(seed)
    rows, size, inputs = choose.randint(1, MOST_ROWS), choose.randint(1, 90), choose.randint(1, 300)
    x_NI, weight_OI, bias_O = draw(device, dtype, rows, 2 * size, inputs, seed)
    x_NI, weight_OI = x_NI / inputs**0.5, surrounded(weight_OI, choose.randint(0, 5))
    bias = choose.choice((None, bias_O))
    got_NF = GatedFewRows(weight_OI, bias, choose.choice((*GATED_TILES, TINY)))(x_NI)
    assert got_NF.is_contiguous()
    want_NF = expected(x_NI, weight_OI, bias)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got_NF.double(), want_NF, atol=8 * tolerance, rtol=tolerance)


def test_no_rows(device: torch.device) -> None:
    x_NI, weight_OI, _ = draw(device, torch.bfloat16, 1, 8, 16, 1)
    assert multiply_gated(x_NI[:0], weight_OI, None, TINY).shape == (0, 4)
