"""Products of few rows with fixed weights: decode of few streams, where reading the weights takes most of a step's
time.

Legend: N rows of input, I input features, O output features.

Each weight is read once, by a copy to shared memory that runs while earlier ones are multiplied. A program has so many
bytes in flight that one program per multiprocessor is enough: by Little's law an H100 needs some 18 KB (3.35 TB/s, 700
ns, 132 multiprocessors), an H200 26. So inputs are not divided among programs, there are no sums over programs, and the
result is the same every time. The matrix units take eight rows in the time of one.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.early_launch import early_options, let_next_start, wait_for_previous

MOST_ROWS = 16
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class RowTiles:
    """A program has `block_o` outputs and reads 2 * `block_i` inputs of each at a time, `num_stages` - 1 ahead."""

    block_o: int
    block_i: int
    num_warps: int
    num_stages: int


TILES = (RowTiles(16, 128, 2, 5), RowTiles(32, 128, 4, 5), RowTiles(64, 64, 4, 4))
"""They give each of 132 multiprocessors a program from 2,112, about 4,096 and 8,448 outputs on. With more outputs per
program the rows are read less often, and more sums run side by side. The quickest is found by timing on the GPU."""


class FewRowsLinear:
    """A Linear for up to MOST_ROWS rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, tiles: RowTiles) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._tiles = tiles

    def __call__(self, x_NI: Tensor) -> Tensor:
        return multiply_few(x_NI, self._weight_OI, self._bias_O, self._tiles)


def multiply_few(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: RowTiles) -> Tensor:
    """x @ weight.T + bias in the dtype of x, which must be that of the weights; summed in float32 and rounded once.
    Rows of x and of the weights must be dense. Rows that begin at multiples of 16 numbers are read 16 bytes at a time.
    """
    return run_rows(multiply_rows, weight_OI.shape[0], x_NI, weight_OI, bias_O, tiles)


def run_rows(
    kernel: Any, outputs: int, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: RowTiles
) -> Tensor:
    """Dense [N, outputs] by a kernel with the arguments of multiply_rows."""
    rows, inputs = x_NI.shape
    assert rows <= MOST_ROWS
    assert weight_OI.shape[1] == inputs
    assert x_NI.dtype == weight_OI.dtype
    assert weight_OI.stride(1) == x_NI.stride(1) == 1
    out_NO = torch.empty((rows, outputs), dtype=x_NI.dtype, device=x_NI.device)
    if rows == 0:
        return out_NO
    kernel[(triton.cdiv(outputs, tiles.block_o),)](
        x_NI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_NO,
        rows,
        outputs,
        inputs,
        x_NI.stride(0),
        weight_OI.stride(0),
        BLOCK_N=8 if rows <= 8 else 16,
        BLOCK_O=tiles.block_o,
        BLOCK_I=tiles.block_i,
        COMPUTE=compute_dtype(x_NI),
        HAS_BIAS=bias_O is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **early_options(x_NI.device),
    )
    return out_NO


def compute_dtype(x_NI: Tensor) -> tl.dtype:
    """The dtype of products. The interpreter multiplies bfloat16's bits as if they were integers, so it gets
    float32."""
    if x_NI.dtype == torch.bfloat16 and x_NI.device.type == "cpu":
        return tl.float32
    return _DTYPES[x_NI.dtype]


@triton.jit(do_not_specialize=["rows"])
def multiply_rows(
    x_NI,
    weight_OI,
    bias_O,
    out_NO,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: blocks of BLOCK_O outputs; outputs past the end read the last one's weights again. There are two sums, each
    of every other block of inputs: two chains of products that do not wait for each other."""
    at_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_N = tl.arange(0, BLOCK_N)
    at_I = tl.arange(0, BLOCK_I)
    row_O = tl.minimum(at_O, outputs - 1).to(tl.int64)
    inside_N = at_N < rows
    weights_OI = weight_OI + row_O[:, None] * weight_stride + at_I[None, :]
    x_IN = x_NI + at_N[None, :].to(tl.int64) * x_stride + at_I[:, None]
    sum_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    other_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    wait_for_previous(EARLY)
    for first in range(0, inputs, 2 * BLOCK_I):
        second = first + BLOCK_I
        sum_ON = add_block(sum_ON, weights_OI + first, x_IN + first, at_I < inputs - first, inside_N, COMPUTE)
        inside_I = at_I < inputs - second
        other_ON = add_block(other_ON, weights_OI + second, x_IN + second, inside_I, inside_N, COMPUTE)
    sum_ON += other_ON
    let_next_start(EARLY)
    if HAS_BIAS:
        sum_ON += tl.load(bias_O + row_O)[:, None].to(tl.float32)
    to_ON = out_NO + at_N[None, :].to(tl.int64) * outputs + at_O[:, None]
    tl.store(to_ON, sum_ON.to(out_NO.dtype.element_ty), (at_O < outputs)[:, None] & inside_N[None, :])


@triton.jit
def add_block(sum_ON, weights_OI, x_IN, inside_I, inside_N, COMPUTE: tl.constexpr):
    block_OI = tl.load(weights_OI, inside_I[None, :], 0.0)
    rows_IN = tl.load(x_IN, inside_I[:, None] & inside_N[None, :], 0.0)
    return tl.dot(block_OI.to(COMPUTE), rows_IN.to(COMPUTE), sum_ON, input_precision="ieee")
