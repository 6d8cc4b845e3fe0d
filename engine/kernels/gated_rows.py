"""The gated half of an MLP for few rows, in one kernel: silu(x @ gate.T) * (x @ up.T).

As engine/kernels/few_rows.py, with two matrices that are read side by side. What it saves is a kernel, and the way of
the products' results through memory.

Legend: N rows of input, I input features, O = 2 * F output features, F inner size of the MLP.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.early_launch import let_next_start, wait_for_previous
from engine.kernels.few_rows import RowTiles, add_block, run_rows

GATED_TILES = (RowTiles(32, 128, 4, 4), RowTiles(64, 64, 4, 4))
"""`block_o` is the gate's outputs of a program, which has as many of the other matrix. The quickest is found by timing
on the GPU."""


class GatedFewRows:
    """silu(gate) * up as a Linear for up to MOST_ROWS rows; the gate is the first half of the outputs."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, tiles: RowTiles) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._tiles = tiles

    def __call__(self, x_NI: Tensor) -> Tensor:
        return multiply_gated(x_NI, self._weight_OI, self._bias_O, self._tiles)


def multiply_gated(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: RowTiles) -> Tensor:
    """Dense [N, F] in the dtype of x, which must be that of the weights; computed in float32 and rounded once. Rows of
    x and of the weights must be dense."""
    assert weight_OI.shape[0] % 2 == 0
    return run_rows(multiply_gated_rows, weight_OI.shape[0] // 2, x_NI, weight_OI, bias_O, tiles)


@triton.jit(do_not_specialize=["rows"])
def multiply_gated_rows(
    x_NI,
    weight_OI,
    bias_O,
    out_NF,
    rows,
    size,
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
    """Grid: blocks of BLOCK_O outputs of the gate; outputs past the end read the last one's weights again."""
    at_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_N = tl.arange(0, BLOCK_N)
    at_I = tl.arange(0, BLOCK_I)
    row_O = tl.minimum(at_O, size - 1).to(tl.int64)
    inside_N = at_N < rows
    gates_OI = weight_OI + row_O[:, None] * weight_stride + at_I[None, :]
    ups_OI = gates_OI + size * weight_stride.to(tl.int64)
    x_IN = x_NI + at_N[None, :].to(tl.int64) * x_stride + at_I[:, None]
    gate_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    up_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    wait_for_previous(EARLY)
    for first in range(0, inputs, BLOCK_I):
        inside_I = at_I < inputs - first
        gate_ON = add_block(gate_ON, gates_OI + first, x_IN + first, inside_I, inside_N, COMPUTE)
        up_ON = add_block(up_ON, ups_OI + first, x_IN + first, inside_I, inside_N, COMPUTE)
    let_next_start(EARLY)
    if HAS_BIAS:
        gate_ON += tl.load(bias_O + row_O)[:, None].to(tl.float32)
        up_ON += tl.load(bias_O + size + row_O)[:, None].to(tl.float32)
    product_ON = gate_ON * tl.sigmoid(gate_ON) * up_ON
    to_ON = out_NF + at_N[None, :].to(tl.int64) * size + at_O[:, None]
    tl.store(to_ON, product_ON.to(out_NF.dtype.element_ty), (at_O < size)[:, None] & inside_N[None, :])
