"""Products with matrices held in fp8, on a GPU: by one of two kernels that read the bytes, or by torch after the matrix
was multiplied out to memory that all matrices of a model share. The quickest is found by timing, for each number of
rows.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.fp8_few_rows import ROW_TILES, SUMS_ROWS, multiply_fp8_sums, sums_fit
from engine.kernels.fp8_rows import MOST_ROWS, TILES, fits, multiply_fp8, multiply_out
from engine.models.device_linear import Linears
from engine.models.linear import Linear
from engine.models.measured_linear import TORCH, MeasuredLinears, Timer
from engine.models.quantized_matrix import QuantizedMatrix

FP8_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that are timed; for more, matrices are multiplied out."""


Kernel = Callable[[Tensor, Tensor, Tensor, int, Tensor | None], Tensor]
"""Rows, values, scales, inputs of a scale and bias to products."""


def kernels(matrix: QuantizedMatrix) -> Iterator[tuple[str, int, Kernel]]:
    """Those that can multiply with the matrix: name, most rows, and the function."""
    inputs, blocks = matrix.values_OI.shape[1], matrix.scales_OB.shape[1]
    if sums_fit(inputs, matrix.columns, blocks):
        for row in ROW_TILES:
            name = f"fp8_sums_{row.block_o}x{row.num_warps}"
            yield name, SUMS_ROWS, partial(multiply_fp8_sums, tiles=row)
    if fits(matrix.columns, blocks):
        for tiles in TILES:
            yield f"fp8_{tiles.block_o}x{tiles.block_n}", MOST_ROWS, partial(multiply_fp8, tiles=tiles)


class Scratch:
    """Memory for the largest of a model's matrices, multiplied out. Its place is final once all are reserved."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._held: Tensor | None = None

    def reserve(self, like: Tensor) -> None:
        if self._held is None or self._held.numel() < like.numel():
            self._held = None
            self._held = torch.empty(like.numel(), dtype=self.dtype, device=like.device)

    def shaped(self, like: Tensor) -> Tensor:
        assert self._held is not None
        return self._held[: like.numel()].view(like.shape)


class ScratchLinear:
    """For any number of rows. Two such products must not run at a time."""

    def __init__(self, matrix: QuantizedMatrix, bias_O: Tensor | None, scratch: Scratch) -> None:
        self._matrix = matrix
        self._bias_O = bias_O
        self._scratch = scratch
        scratch.reserve(matrix.values_OI)

    def __call__(self, x_NI: Tensor) -> Tensor:
        matrix = self._matrix
        weight_OI = self._scratch.shaped(matrix.values_OI)
        multiply_out(matrix.values_OI, matrix.scales_OB, matrix.columns, weight_OI)
        return F.linear(x_NI, weight_OI, self._bias_O)


class Fp8KernelLinear:
    """`kernel` is multiply_fp8 or multiply_fp8_sums, with its tiles."""

    def __init__(self, matrix: QuantizedMatrix, bias_O: Tensor | None, kernel: Kernel) -> None:
        self._matrix = matrix
        self._bias_O = bias_O
        self._kernel = kernel

    def __call__(self, x_NI: Tensor) -> Tensor:
        matrix = self._matrix
        return self._kernel(x_NI, matrix.values_OI, matrix.scales_OB, matrix.columns, self._bias_O)


class KeepingLinears:
    """Linears that keep matrices in fp8; `plain` makes those of all others. `dtype` is that of activations."""

    def __init__(self, plain: Linears, dtype: torch.dtype, timer: Timer) -> None:
        self._plain = plain
        self._scratch = Scratch(dtype)
        self._timer = timer
        self._measured: dict[int, MeasuredLinears] = {}
        """By the number of inputs that share a scale, 0 if each row has one scale: the kernels depend on it."""

    def __call__(self, weight_OI: Tensor | QuantizedMatrix, bias_O: Tensor | None) -> Linear:
        if isinstance(weight_OI, QuantizedMatrix):
            return self._fp8(weight_OI, bias_O)
        return self._plain(weight_OI, bias_O)

    def keeps(self, matrix: QuantizedMatrix) -> bool:
        return matrix.kind == "fp8"

    def _fp8(self, matrix: QuantizedMatrix, bias_O: Tensor | None) -> Linear:
        ways: dict[str, Callable[[], Linear]] = {TORCH: partial(ScratchLinear, matrix, bias_O, self._scratch)}
        most_rows = {}
        for name, most, kernel in kernels(matrix):
            ways[name] = partial(Fp8KernelLinear, matrix, bias_O, kernel)
            most_rows[name] = most
        outputs, inputs = matrix.values_OI.shape
        shape = outputs, inputs, bias_O is not None
        columns = matrix.columns if matrix.scales_OB.shape[1] > 1 else 0
        measured = self._measured.setdefault(columns, MeasuredLinears({}, self._timer, FP8_ROWS))
        return measured.choose(shape, self._scratch.dtype, matrix.values_OI.device, ways, most_rows)

    def describe(self) -> Mapping[str, str]:
        about = dict(self._plain.describe())
        found = [measured.describe() for measured in self._measured.values()]
        for key in found[0] if found else ():
            about[f"fp8_{key}"] = "; ".join(each[key] for each in found)
        return about
