"""silu(gate) * up against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.silu_mul import FEW_TOKENS, silu_mul
from tests.unit.engine.kernels.rounding import ROUNDING, assert_rounded_once

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def assert_close(got_NF: Tensor, gate_up_N2F: Tensor) -> None:
    gate_NF, up_NF = gate_up_N2F.double().chunk(2, -1)
    assert got_NF.is_contiguous()
    assert_rounded_once(got_NF, gate_NF * gate_NF.sigmoid() * up_NF)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (17, 24), (3, 1100), (1, 4096), (FEW_TOKENS + 1, 37)])
def test_against_float64(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    gate_up_N2F = (torch.randn(tokens, 2 * size) * 3).to(device, dtype)
    assert_close(silu_mul(gate_up_N2F), gate_up_N2F)


def test_strided_rows_and_large_numbers(device: torch.device) -> None:
    wide = torch.full((4, 300), torch.nan, device=device)
    wide[::2, :200] = torch.linspace(-200.0, 200.0, 200, device=device)
    gate_up_N2F = wide[::2, :200]
    got_NF = silu_mul(gate_up_N2F)
    assert bool(got_NF.isfinite().all())
    assert_close(got_NF, gate_up_N2F)


def test_of_nothing(device: torch.device) -> None:
    assert silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)
