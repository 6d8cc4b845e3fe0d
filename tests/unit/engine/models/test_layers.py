"""Norm and rotary positions against their textbook formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from engine.models.layers import RmsNorm, RotaryTable, interleave_rotary, rotate_
from engine.models.rope import RopeSpec, RopeType, rotary_frequencies

CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_rms_norm(scale: float) -> None:
    x, weight = torch.randn(5, 3, 24) * scale, torch.randn(3, 24)
    expected = rms_norm(x, (24,), eps=1e-6) * weight
    torch.testing.assert_close(RmsNorm(weight, 1e-6)(x), expected, atol=1e-6, rtol=1e-5)
    narrow = RmsNorm(weight.bfloat16(), 1e-6)(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), expected, atol=0.02, rtol=0.03)
    assert RmsNorm(weight, 1e-6)(torch.zeros(1, 3, 24)).abs().max() == 0.0


def rotate_halves(x_NHD: Tensor, positions_N: Tensor, spec: RopeSpec) -> Tensor:
    """The pairing of the checkpoint: feature c rotates with feature c + D / 2."""
    dim = x_NHD.shape[-1]
    angles = positions_N.double()[:, None, None] * rotary_frequencies(spec, dim).double()
    x_NHD = x_NHD.double() * spec.attention_factor
    first, second = x_NHD.chunk(2, -1)
    turned = [
        first * angles.cos() - second * angles.sin(),
        second * angles.cos() + first * angles.sin(),
    ]
    return torch.cat(turned, -1).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_rotation_of_interleaved_pairs(kind: RopeType, dtype: torch.dtype) -> None:
    spec = RopeSpec(10_000.0, kind, 4.0, 1.0, 4.0, 32, attention_factor=1.2)
    x_NHD, positions_N = torch.randn(6, 3, 16), torch.tensor([0, 1, 5, 40, 99, 127])
    expected = rotate_halves(x_NHD, positions_N, spec)

    def interleaved(rows: Tensor) -> Tensor:
        return torch.stack([interleave_rotary(row.flatten(), 16).view(3, 16) for row in rows])

    got = interleaved(x_NHD).to(dtype)
    rotate_(got, RotaryTable(spec, 16, 128, CPU).rotations(positions_N))
    tolerance = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(got.float(), interleaved(expected), atol=tolerance, rtol=tolerance)


def test_linear_and_llama3_slow_the_long_waves() -> None:
    plain = rotary_frequencies(RopeSpec(), 64)
    assert torch.equal(rotary_frequencies(RopeSpec(type="linear", factor=2.0), 64), plain / 2.0)
    llama3 = rotary_frequencies(RopeSpec(type="llama3", factor=8.0, original_context_len=8192), 64)
    assert torch.equal(llama3[:4], plain[:4])
    assert torch.allclose(llama3[-1], plain[-1] / 8.0)
