"""RMSNorm and its residual sum against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.rms_norm import rms_norm
from tests.unit.engine.kernels.rounding import ROUNDING, assert_rounded_once

pytestmark = pytest.mark.usefixtures("poisoned_memory")

EPS = 1e-5


def expected(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("tokens", "size"), [(1, 24), (17, 100), (3, 576), (1, 4096), (3, 4096), (2, 5000), (1, 12288)]
)
def test_against_float64(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens * size)
    scales_N1 = torch.tensor([1.0, 1e-4, 300.0])[torch.arange(tokens) % 3, None]
    x_NE = (torch.randn(tokens, size) * scales_N1).to(device, dtype)
    weight_E = torch.randn(size).to(device, dtype)
    before = x_NE.clone()
    assert_rounded_once(rms_norm(x_NE, weight_E, EPS), expected(x_NE, weight_E))
    assert torch.equal(x_NE, before)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (17, 24), (3, 576), (2, 4096)])
def test_residual_sum(device: torch.device, tokens: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    x_NE, delta_NE = torch.randn(2, tokens, size).to(device, dtype)
    weight_E = torch.randn(size).to(device, dtype)
    before_NE, delta_before = x_NE.double(), delta_NE.clone()
    got_NE = rms_norm(x_NE, weight_E, EPS, delta_NE)
    assert_rounded_once(x_NE, before_NE + delta_NE)
    assert torch.equal(delta_NE, delta_before)
    assert_rounded_once(got_NE, expected(x_NE, weight_E))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("groups", "size"), [(1, 16), (5, 24), (7, 128), (3, 256), (2, 600)])
def test_strided_groups(device: torch.device, groups: int, size: int, dtype: torch.dtype) -> None:
    """Query and key heads lie in one matrix with the values. What lies around them must not change."""
    torch.manual_seed(groups)
    wide_NGE = torch.randn(9, groups + 3, size + 8).to(device, dtype)
    delta_NGE = torch.randn(9, groups, 2 * size).to(device, dtype)[..., :size]
    x_NGE, before = wide_NGE[:, 1 : groups + 1, :size], wide_NGE.clone()
    weight_GE = torch.randn(groups, size).to(device, dtype)
    got_NGE = rms_norm(x_NGE, weight_GE, EPS)
    assert got_NGE.is_contiguous()
    assert_rounded_once(got_NGE, expected(x_NGE, weight_GE))
    assert_rounded_once(rms_norm(x_NGE, weight_GE[0], EPS), expected(x_NGE, weight_GE[0]))
    assert torch.equal(wide_NGE, before)

    got_NGE = rms_norm(x_NGE, weight_GE, EPS, delta_NGE)
    assert_rounded_once(x_NGE, before[:, 1 : groups + 1, :size].double() + delta_NGE)
    assert_rounded_once(got_NGE, expected(x_NGE, weight_GE))
    before[:, 1 : groups + 1, :size] = x_NGE
    assert torch.equal(wide_NGE, before), "what lies around the rows was changed"


def test_of_nothing(device: torch.device) -> None:
    assert rms_norm(torch.empty(0, 8, device=device), torch.ones(8, device=device), EPS).shape == (0, 8)


def test_zeros_stay_zero(device: torch.device) -> None:
    got = rms_norm(torch.zeros(2, 40, device=device), torch.ones(40, device=device), EPS)
    assert torch.equal(got, torch.zeros(2, 40, device=device))
