"""Products with weights held in fp8, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.kernels.fp8_rows import TILES, Fp8Tiles, fits, multiply_fp8, multiply_out
from engine.models.quantized_matrix import QuantizedMatrix
from tests.unit.engine.kernels.rounding import ROUNDING, assert_rounded_once, crossed

pytestmark = pytest.mark.usefixtures("poisoned_memory")
TINY = Fp8Tiles(16, 16, 16, 1, 2, True)


def draw(device: torch.device, outputs: int, inputs: int, columns: int) -> QuantizedMatrix:
    torch.manual_seed(outputs + inputs)
    values_OI = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).to(device)
    scales_OB = (torch.rand(outputs, -(-inputs // columns)) + 0.5).to(device)
    return QuantizedMatrix(values_OI, scales_OB, columns)


def every_number(device: torch.device) -> tuple[Tensor, Tensor]:
    """A diagonal matrix [O, I] with every fp8 number but those that are none, and its diagonal [O] in float32."""
    values_O = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num()
    return values_O.diag().to(torch.float8_e4m3fn).to(device), values_O.to(device)


def check(
    x_NI: Tensor, matrix: QuantizedMatrix, bias_O: Tensor | None, kernel: Callable[..., Tensor]
) -> None:
    got_NO = kernel(x_NI, matrix.values_OI, matrix.scales_OB, matrix.columns, bias_O)
    weight_OI = matrix.multiplied(torch.float64)
    wide_NO = x_NI.double() @ weight_OI.t()
    scale_NO = x_NI.double().abs() @ weight_OI.abs().t()
    if bias_O is not None:
        wide_NO += bias_O.double()
        scale_NO += bias_O.double().abs()
    assert_rounded_once(got_NO, wide_NO, scale_NO)


@pytest.mark.parametrize(
    ("rows", "columns", "tiles", "dtype"),
    crossed([(1, 333), (5, 128), (16, 48), (64, 333), (65, 128)], [*TILES, TINY]),
)
def test_against_float64(
    device: torch.device, rows: int, columns: int, tiles: Fp8Tiles, dtype: torch.dtype
) -> None:
    matrix = draw(device, 75, 333, columns)
    x_NI = torch.randn(rows, 333).to(device, dtype)
    bias_O = torch.randn(75).to(device, dtype)
    check(x_NI, matrix, bias_O if rows % 2 else None, partial(multiply_fp8, tiles=tiles))


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_number_is_exact(device: torch.device, tiles: Fp8Tiles, dtype: torch.dtype) -> None:
    """Also those below the normal ones, and the largest. Each is multiplied by one."""
    diagonal_OI, expected_O = every_number(device)
    ones_OB = torch.ones(256, 1, device=device)
    x_NI = torch.ones(1, 256, dtype=dtype, device=device)
    got_NO = multiply_fp8(x_NI, diagonal_OI, ones_OB, 256, None, tiles)
    assert torch.equal(got_NO[0].float(), expected_O)


def test_of_no_rows(device: torch.device) -> None:
    matrix = draw(device, 5, 32, 32)
    x_NI = torch.empty(0, 32, device=device)
    got_NO = multiply_fp8(x_NI, matrix.values_OI, matrix.scales_OB, 32, None, TINY)
    assert got_NO.shape == (0, 5)


def test_which_blocks_fit() -> None:
    assert fits(7, 1)
    assert fits(48, 2)
    assert not fits(24, 2)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("columns", [333, 128, 24])
def test_multiplied_out(device: torch.device, dtype: torch.dtype, columns: int) -> None:
    matrix = draw(device, 20, 333, columns)
    out_OI = torch.empty(20, 333, dtype=dtype, device=device)
    multiply_out(matrix.values_OI, matrix.scales_OB, columns, out_OI)
    expected_OI = matrix.multiplied(dtype)
    if device.type == "cpu":  # the interpreter may round to bfloat16 the other way
        torch.testing.assert_close(out_OI, expected_OI, rtol=torch.finfo(dtype).eps, atol=0.0)
    else:
        assert torch.equal(out_OI, expected_OI)
