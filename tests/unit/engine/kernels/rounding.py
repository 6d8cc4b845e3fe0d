"""The error bounds of a kernel that computes in float32 and rounds its result once, compared with float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = not torch.cuda.is_available()
ROUNDING = {
    torch.float32: 0.0,
    # Triton's interpreter truncates where the compiler rounds to the nearest.
    torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8,
    torch.float16: 2.0**-11,
}
"""The relative error of the final rounding, by dtype of the result."""
ON_THE_WAY = 2e-6
"""The relative error of the float32 computation."""


def assert_rounded_once(got: Tensor, wide: Tensor, scale: Tensor | None = None) -> None:
    """Checks `got` against `wide`, the float64 result. Errors of the computation are relative to `scale`, which matters
    where sums cancel; without `scale` they are relative to the result."""
    bound = wide.abs() * ROUNDING[got.dtype] * 1.01
    bound += (wide.abs() if scale is None else scale) * ON_THE_WAY + 1e-7
    worst = float(((got.double() - wide).abs() - bound).max())
    assert worst <= 0.0, f"{worst} past the bound"


def crossed(shapes: Sequence[tuple[int, ...]], tiles: Sequence[object]) -> list[Any]:
    """Each shape with each of the tiles: on a card in every dtype, in the interpreter in one. There each shape and each
    of the tiles has every dtype all the same."""
    return [
        pytest.param(*shape, tile, dtype, id=f"{'-'.join(map(str, shape))}-{tile}-{dtype}")
        for (row, shape), (column, tile) in product(enumerate(shapes), enumerate(tiles))
        for number, dtype in enumerate(ROUNDING)
        if not INTERPRETED or number == (row + column) % len(ROUNDING)
    ]
