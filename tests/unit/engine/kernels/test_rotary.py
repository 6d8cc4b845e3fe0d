"""Rotation of heads, with and without their norms, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels.rotary import rotate_heads_
from engine.models.layers import RotaryTable
from engine.models.rope import RopeSpec
from tests.unit.engine.kernels.rounding import ROUNDING, assert_rounded_once

EPS = 1e-6


def rotations_of(tokens: int, dim: int, device: torch.device) -> Tensor:
    positions_N = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(dim))
    return RotaryTable(RopeSpec(), dim, 512, device).rotations(positions_N.to(device))


def expected(x_NHD: Tensor, rotations_N1C: Tensor, weight_HD: Tensor | None) -> Tensor:
    wide_NHD = x_NHD.double()
    if weight_HD is not None:
        wide_NHD = wide_NHD / (wide_NHD.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_HD.double()
    pairs_NHC = torch.view_as_complex(wide_NHD.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs_NHC * rotations_N1C.to(torch.complex128)).flatten(-2)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 1, 16), (3, 5, 24), (17, 3, 64), (2, 9, 100), (1, 40, 128), (3, 7, 256)]
)
def test_against_float64(
    device: torch.device, tokens: int, heads: int, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    wide_NHD = torch.randn(tokens, heads + 4, dim).to(device, dtype)
    x_NHD, before = wide_NHD[:, 1 : heads + 1], wide_NHD.clone()
    weight_HD = torch.randn(heads, dim).to(device, dtype) if normed else None
    rotations_N1C = rotations_of(tokens, dim, device)
    wanted = expected(x_NHD, rotations_N1C, weight_HD)
    rotate_heads_(x_NHD, rotations_N1C, weight_HD, EPS)

    length = wanted.unflatten(-1, (-1, 2)).norm(dim=-1, keepdim=True).expand(-1, -1, -1, 2).flatten(-2)
    assert_rounded_once(x_NHD, wanted, length)
    before[:, 1 : heads + 1] = x_NHD
    assert torch.equal(wide_NHD, before), "heads beside those given were changed"


def test_heads_may_be_strided_and_rotations_a_slice(device: torch.device) -> None:
    torch.manual_seed(1)
    wide = torch.randn(6, 4, 96, device=device)
    x_NHD = wide[1::2, ::2, 32:64]
    rotations_N1C = rotations_of(7, 32, device)[::3]
    wanted, before = expected(x_NHD, rotations_N1C, None), wide.clone()
    rotate_heads_(x_NHD, rotations_N1C)
    torch.testing.assert_close(x_NHD.double(), wanted, atol=1e-6, rtol=1e-6)
    before[1::2, ::2, 32:64] = x_NHD
    assert torch.equal(wide, before)


def test_of_nothing(device: torch.device) -> None:
    rotate_heads_(torch.empty(0, 3, 16, device=device), rotations_of(0, 16, device))
