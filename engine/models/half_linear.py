"""Float32 products with weights stored in 16 bits, exactly.

Decode reads every weight once for each step, so its time depends on the number of bytes. A checkpoint saved in bfloat16
has 8 significant bits; float16 has 11, but a narrower range. Scaled by a power of two, such weights fit float16 without
loss, and FBGEMM's kernels widen them to float32 in registers. Activations and sums stay float32: the result is that of
float32 weights up to the order of summation. Where a weight does not fit, `halve_exactly` returns None and nothing is
halved.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_HALF_EXPONENT = 15
"""float16 holds magnitudes below 2 ** 16."""


@dataclass(frozen=True, slots=True)
class HalfWeights:
    """`scaled_OI` is float32, every element a float16 number; the weights are scaled_OI / scale."""

    scaled_OI: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class HalfKernels:
    """Which kernels this torch has for this CPU. The `quick` ones are deprecated in torch, and may be removed."""

    threaded: bool
    quick: bool


def halve_exactly(weight_OI: Tensor) -> HalfWeights | None:
    """The weights in float16 without any loss, or None."""
    largest = float(weight_OI.abs().max())
    if not math.isfinite(largest):
        return None
    scale = 1.0
    if largest > 0.0:
        scale = 2.0 ** (LARGEST_HALF_EXPONENT - math.frexp(largest)[1])
    scaled_OI = weight_OI * scale
    return HalfWeights(scaled_OI, scale) if torch.equal(scaled_OI.half().float(), scaled_OI) else None


def find_half_kernels() -> HalfKernels:
    """Tries both on a tiny matrix: they exist only in some builds and work only on some CPUs."""
    half = HalfWeights(torch.eye(2), 1.0)
    x_NI = torch.tensor([[1.0, 2.0]])

    def works(kind: type[QuickHalfLinear] | type[ThreadedHalfLinear]) -> bool:
        try:
            return torch.equal(kind(half, None)(x_NI), x_NI)
        except (AttributeError, RuntimeError):
            return False

    with warnings.catch_warnings():
        # torch warns once that the quick ones are deprecated. The warning is hidden here.
        warnings.simplefilter("ignore")
        return HalfKernels(works(ThreadedHalfLinear), works(QuickHalfLinear))


class ThreadedHalfLinear:
    """Shares the work among threads. Its slow start (10 µs) does not matter for large matrices."""

    def __init__(self, half: HalfWeights, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16.default(half.scaled_OI, None)
        self._operator = torch.ops.quantized.linear_dynamic_fp16.default
        self._unscale = torch.tensor(1.0 / half.scale)
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        y_NO: Tensor = self._operator(x_NI, self._packed).mul_(self._unscale)
        return y_NO if self._bias_O is None else y_NO.add_(self._bias_O)


class QuickHalfLinear:
    """Runs on one thread and starts at once: the quickest for few rows of a matrix that stays in cache."""

    def __init__(self, half: HalfWeights, bias_O: Tensor | None) -> None:
        self._packed = torch.fbgemm_pack_gemm_matrix_fp16(half.scaled_OI)
        self._outputs = half.scaled_OI.shape[0]
        self._operator = torch.fbgemm_linear_fp16_weight_fp32_activation
        self._unscale = torch.tensor(1.0 / half.scale)
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        y_NO: Tensor = self._operator(x_NI, self._packed, None, x_NI.new_empty(x_NI.shape[0], self._outputs))
        y_NO.mul_(self._unscale)
        return y_NO if self._bias_O is None else y_NO.add_(self._bias_O)
