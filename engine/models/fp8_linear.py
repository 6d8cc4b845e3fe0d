"""Products with matrices held in fp8, on a GPU: by a kernel that reads the bytes, or by torch after the matrix was
multiplied out to memory that all matrices of a model share. The quickest for each number of rows is found by timing.

Legend: N rows of input, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.fp8_rows import TILES, Fp8Tiles, fits, multiply_fp8, multiply_out
from engine.models.device_linear import TORCH, Linears, MeasuredLinears, Timer
from engine.models.fp8_matrix import Fp8Matrix
from engine.models.linear import Linear

FP8_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of rows that are timed; for more, matrices are multiplied out."""


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

    def __init__(self, matrix: Fp8Matrix, bias_O: Tensor | None, scratch: Scratch) -> None:
        self._matrix = matrix
        self._bias_O = bias_O
        self._scratch = scratch
        scratch.reserve(matrix.values_OI)

    def __call__(self, x_NI: Tensor) -> Tensor:
        matrix = self._matrix
        weight_OI = self._scratch.shaped(matrix.values_OI)
        multiply_out(matrix.values_OI, matrix.scales_OB, matrix.columns, weight_OI)
        return F.linear(x_NI, weight_OI, self._bias_O)


class Fp8RowsLinear:
    """The kernel."""

    def __init__(self, matrix: Fp8Matrix, bias_O: Tensor | None, tiles: Fp8Tiles) -> None:
        self._matrix = matrix
        self._bias_O = bias_O
        self._tiles = tiles

    def __call__(self, x_NI: Tensor) -> Tensor:
        matrix = self._matrix
        return multiply_fp8(
            x_NI, matrix.values_OI, matrix.scales_OB, matrix.columns, self._bias_O, self._tiles
        )


class KeepingLinears:
    """Linears that keep matrices in fp8; `plain` makes those of all others. `dtype` is that of activations."""

    def __init__(self, plain: Linears, dtype: torch.dtype, timer: Timer) -> None:
        self._plain = plain
        self._scratch = Scratch(dtype)
        self._measured = MeasuredLinears({}, timer, FP8_ROWS)
        self._kept = 0

    def __call__(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        return self._plain(weight_OI, bias_O)

    def fp8(self, matrix: Fp8Matrix, bias_O: Tensor | None) -> Linear:
        self._kept += 1
        ways: dict[str, Callable[[], Linear]] = {TORCH: partial(ScratchLinear, matrix, bias_O, self._scratch)}
        if fits(matrix.columns, matrix.scales_OB.shape[1]):
            for tiles in TILES:
                ways[f"fp8_{tiles.block_o}x{tiles.block_n}"] = partial(Fp8RowsLinear, matrix, bias_O, tiles)
        outputs, inputs = matrix.values_OI.shape
        shape = outputs, inputs, bias_O is not None
        return self._measured.choose(shape, self._scratch.dtype, matrix.values_OI.device, ways)

    def describe(self) -> Mapping[str, str]:
        about = dict(self._plain.describe())
        if self._kept:
            about |= {f"fp8_{key}": value for key, value in self._measured.describe().items()}
        return about
