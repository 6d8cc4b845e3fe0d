"""Matrix products with fixed weights. The model does not know how the weights are stored.

On a CPU no single operator is fast both for one row and for several: torch's own linear reads weights with one thread
for one row, and slows down further with two. Measured figures are in benchmarks/measured/cpu-engine.md.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.half_linear import (
    HalfKernels,
    HalfWeights,
    QuickHalfLinear,
    ThreadedHalfLinear,
    find_half_kernels,
    halve_exactly,
)

SMALL_ELEMENTS = 2**19
"""Up to this many weights a matrix is worth a second copy in another layout, and not worth a second thread."""

FEW_ROWS = 8
"""Rows up to which reading the weights takes longer than multiplying them."""

SLICES = 16
"""Pieces of a matrix that are multiplied separately, so that threads share one row's work."""

TYPICAL_ROWS = 8
"""The number of rows that the packed layout is chosen for; it works about as well for others."""


class Linear(Protocol):
    """y_NO = x_NI @ weight_OI.T + bias_O, in the dtype of x."""

    def __call__(self, x_NI: Tensor, /) -> Tensor: ...


LinearFactory = Callable[[Tensor, Tensor | None], Linear]
"""Takes weight_OI and bias_O, which it may keep."""


@runtime_checkable
class GatedLinears(Protocol):
    """A LinearFactory that can also fuse the two matrices of a gated MLP with their activation."""

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None, /) -> Linear: ...

    def gated(self, gate_up_OI: Tensor, bias_O: Tensor | None, /) -> Linear:
        """silu(gate) * up, O / 2 features wide; the gate is the first half of the outputs."""


class ActivatedLinear:
    """A product, and then `activate` as an operator of its own: [N, O] to [N, O / 2]."""

    def __init__(self, gate_up: Linear, activate: Callable[[Tensor], Tensor]) -> None:
        self._gate_up = gate_up
        self._activate = activate

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._activate(self._gate_up(x_NI))


class PlainLinear:
    """The reference: one call of torch's own linear."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, self._weight_OI, self._bias_O)


class TransposedLinear:
    """A copy of the weights with inputs as rows: the quickest for one row while the weights stay in cache."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_IO = weight_OI.t().contiguous()
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._bias_O is None:
            return torch.mm(x_NI, self._weight_IO)
        return torch.addmm(self._bias_O, x_NI, self._weight_IO)


class SlicedLinear:
    """One row times slices of the weights, as a batch: every thread reads its share, at memory's full speed.

    The vector's strides must look transposed (size 1 included), else the operator takes a slow path.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        outputs, inputs = weight_OI.shape
        self._slices = next(count for count in range(min(SLICES, outputs), 0, -1) if outputs % count == 0)
        self._weight_SPI = weight_OI.view(self._slices, outputs // self._slices, inputs)
        self._bias_O = bias_O

    def __call__(self, x_NI: Tensor) -> Tensor:
        assert x_NI.shape[0] == 1
        x_SI1 = x_NI.t().expand(self._slices, x_NI.shape[1], 1)
        y_1O = torch.bmm(self._weight_SPI, x_SI1).view(1, -1)
        return y_1O if self._bias_O is None else y_1O.add_(self._bias_O)


class OneDnnLinear:
    """oneDNN's product, on the weights as they are or on a copy in its own layout (`packed`).

    Weights may be narrower than the activations: rows are then rounded to the weights' dtype, and widened after.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, *, packed: bool) -> None:
        self._dtype = weight_OI.dtype
        reorder = torch.ops.mkldnn._reorder_linear_weight.default
        self._weight_OI = reorder(weight_OI.contiguous(), TYPICAL_ROWS) if packed else weight_OI
        self._bias_O = bias_O
        self._operator = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_NI: Tensor) -> Tensor:
        narrow_NI = x_NI if x_NI.dtype == self._dtype else x_NI.to(self._dtype)
        y_NO: Tensor = self._operator(narrow_NI, self._weight_OI, self._bias_O, "none", [], "")
        return y_NO if y_NO.dtype == x_NI.dtype else y_NO.to(x_NI.dtype)


class CastingLinear:
    """PlainLinear for weights narrower than the activations."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._plain = PlainLinear(weight_OI, bias_O)
        self._dtype = weight_OI.dtype

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._plain(x_NI.to(self._dtype)).to(x_NI.dtype)


class SplitLinear:
    """One way for up to `limit` rows (decode of few streams), another for more rows."""

    def __init__(self, few: Linear, many: Linear, limit: int) -> None:
        self._few = few
        self._many = many
        self._limit = limit

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._few(x_NI) if x_NI.shape[0] <= self._limit else self._many(x_NI)


def linear_factory(weights: torch.dtype) -> LinearFactory:
    """The fastest kind of linear on a CPU for weights of this dtype and rows in float32."""
    if not has_onednn() or weights == torch.float16:
        return PlainLinear if weights == torch.float32 else CastingLinear
    kernels = find_half_kernels()
    if weights == torch.float32:
        return partial(float32_linear, kernels=kernels)
    return partial(bfloat16_linear, kernels=kernels, packs=packs_bfloat16())


def float32_linear(weight_OI: Tensor, bias_O: Tensor | None, kernels: HalfKernels) -> Linear:
    """Float32 arithmetic; weights are stored in half the bytes where that loses nothing."""
    half = halve_exactly(weight_OI) if kernels.threaded else None
    if half is not None:
        return half_linear(half, bias_O, kernels)
    weight_OI = weight_OI.contiguous()
    if weight_OI.numel() <= SMALL_ELEMENTS:
        return SplitLinear(
            TransposedLinear(weight_OI, bias_O), OneDnnLinear(weight_OI, bias_O, packed=True), 1
        )
    return SplitLinear(SlicedLinear(weight_OI, bias_O), OneDnnLinear(weight_OI, bias_O, packed=False), 1)


def bfloat16_linear(weight_OI: Tensor, bias_O: Tensor | None, kernels: HalfKernels, packs: bool) -> Linear:
    """Few rows are bound by memory: float32 arithmetic on 16-bit weights is no slower. Many rows (a prompt) are bound
    by arithmetic, and are rounded to bfloat16 for it, where oneDNN packs them (`packs`)."""
    many = OneDnnLinear(weight_OI, bias_O, packed=True) if packs else None
    half = halve_exactly(weight_OI.float()) if kernels.threaded else None
    if half is None:
        return many or CastingLinear(weight_OI, bias_O)
    wide_bias_O = None if bias_O is None else bias_O.float()
    few = half_linear(half, wide_bias_O, kernels)
    return few if many is None else SplitLinear(few, many, FEW_ROWS)


def half_linear(half: HalfWeights, bias_O: Tensor | None, kernels: HalfKernels) -> Linear:
    threaded = ThreadedHalfLinear(half, bias_O)
    if kernels.quick and half.scaled_OI.numel() <= SMALL_ELEMENTS:
        return SplitLinear(QuickHalfLinear(half, bias_O), threaded, FEW_ROWS)
    return threaded


def has_onednn() -> bool:
    """Whether this torch has the two operators that OneDnnLinear calls (torch's compiler emits them too)."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch._C._has_mkldnn and all(hasattr(torch.ops.mkldnn, name) for name in names)


def packs_bfloat16() -> bool:
    """Whether oneDNN takes bfloat16 weights on this CPU. It refuses those without AVX-512 or AVX-NE-CONVERT."""
    try:
        OneDnnLinear(torch.eye(2, dtype=torch.bfloat16), packed=True)
    except RuntimeError:
        return False
    return True
