"""How far a kernel's result may be from float64's, if it is computed in float32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

INTERPRETED = not torch.cuda.is_available()
ROUNDING = {
    torch.float32: 0.0,
    # Triton's interpreter cuts bits off where the compiler rounds to the nearest.
    torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8,
    torch.float16: 2.0**-11,
}
"""Relative, by dtype of the result."""
ON_THE_WAY = 2e-6
"""Relative, of float32."""


def assert_rounded_once(got: Tensor, wide: Tensor, scale: Tensor | None = None) -> None:
    """`scale` is what errors on the way are relative to, if sums cancel; else the result."""
    bound = wide.abs() * ROUNDING[got.dtype] * 1.01
    bound += (wide.abs() if scale is None else scale) * ON_THE_WAY + 1e-7
    worst = float(((got.double() - wide).abs() - bound).max())
    assert worst <= 0.0, f"{worst} past the bound"
