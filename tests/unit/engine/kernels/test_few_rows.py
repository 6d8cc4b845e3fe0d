"""Products of few rows against float64. The memory around rows and weights is NaN: it must not be read, or not
count."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from engine.kernels.few_rows import MOST_ROWS, TILES, FewRowsLinear, RowTiles, multiply_few
from tests.unit.engine.kernels.rounding import ROUNDING, assert_rounded_once

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TINY = RowTiles(16, 16, 1, 2)


def surrounded(inner: Tensor, extra_columns: int) -> Tensor:
    """The same numbers, with NaN before, after and between the rows."""
    rows, columns = inner.shape
    wide = torch.full((rows + 2, columns + extra_columns), torch.nan, dtype=inner.dtype, device=inner.device)
    wide[1:-1, :columns] = inner
    return wide[1:-1, :columns]


def check(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: RowTiles, extra_columns: int = 0
) -> None:
    x_NI, weight_OI = surrounded(x_NI, extra_columns), surrounded(weight_OI, extra_columns)
    got_NO = multiply_few(x_NI, weight_OI, bias_O, tiles)
    assert got_NO.is_contiguous()
    wide_NO = x_NI.double() @ weight_OI.double().t()
    scale_NO = x_NI.double().abs() @ weight_OI.double().abs().t()
    if bias_O is not None:
        wide_NO += bias_O.double()
        scale_NO += bias_O.double().abs()
    assert_rounded_once(got_NO, wide_NO, scale_NO)
    assert torch.equal(got_NO, multiply_few(x_NI, weight_OI, bias_O, tiles)), "not the same twice"


def draw(
    device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    x_NI, weight_OI, bias_O = (torch.randn(shape).to(device, dtype) for shape in shapes)
    return x_NI, weight_OI, bias_O


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(
    ("rows", "biased"), [(1, False), (2, True), (8, False), (9, True), (MOST_ROWS, False)]
)
def test_against_float64(
    device: torch.device, rows: int, biased: bool, tiles: RowTiles, dtype: torch.dtype
) -> None:
    x_NI, weight_OI, bias_O = draw(device, dtype, rows, 80, 320, rows)
    check(x_NI, weight_OI, bias_O if biased else None, tiles, extra_columns=16)


@pytest.mark.parametrize("seed", range(12))
def test_any_product(device: torch.device, seed: int) -> None:
    """Sizes are odd, some smaller than a block, and rows begin anywhere. The test's parameter is the seed."""
    choose = random.Random(seed)
    dtype = choose.choice(list(ROUNDING))
    rows, outputs, inputs = choose.randint(1, MOST_ROWS), choose.randint(1, 150), choose.randint(1, 400)
    x_NI, weight_OI, bias_O = draw(device, dtype, rows, outputs, inputs, seed)
    tiles = choose.choice((*TILES, TINY))
    check(x_NI, weight_OI, choose.choice((None, bias_O)), tiles, choose.randint(0, 5))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_do_not_touch_each_other(device: torch.device) -> None:
    x_NI, weight_OI, _ = draw(device, torch.bfloat16, 3, 40, 64, 1)
    expected_NO = multiply_few(x_NI, weight_OI, None, TINY)
    x_NI[1] = torch.inf
    got_NO = multiply_few(x_NI, weight_OI, None, TINY)
    assert torch.equal(got_NO[::2], expected_NO[::2])
    assert not bool(got_NO[1].isfinite().any())


def test_of_nothing(device: torch.device) -> None:
    linear = FewRowsLinear(torch.ones(5, 8, device=device), None, TINY)
    assert linear(torch.empty(0, 8, device=device)).shape == (0, 5)


def test_more_rows_than_there_may_be(device: torch.device) -> None:
    weight_OI = torch.ones(5, 8, device=device)
    with pytest.raises(AssertionError):
        multiply_few(torch.ones(MOST_ROWS + 1, 8, device=device), weight_OI, None, TINY)
