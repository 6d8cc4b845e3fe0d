"""Products of any number of rows with fixed weights, each summed in one order: a row's bits do not depend on how many
rows there are beside it.

Legend: N rows of input, I input features, O output features (of a gate, half of the matrix's rows).

A result is one chain of sums. It takes 16 inputs at a time, from the first to the last, which is what one instruction
of the matrix units adds up. No two programs share a sum. So all tiles give the same bits, and the quickest may be
chosen by timing. (Two kernels of a library for different numbers of rows divide the inputs among programs in different
ways: Thinking Machines, "Defeating Nondeterminism in LLM Inference", 2025.)
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.early_launch import early_options, let_next_start, wait_for_previous
from engine.kernels.few_rows import compute_dtype

BAND = 8
"""Blocks of outputs that run side by side over all rows, so that what they read stays in the L2 cache."""


@dataclass(frozen=True, slots=True)
class OrderedTiles:
    """A program has `block_n` rows of `block_o` outputs, and reads `block_i` inputs of each at a time, `num_stages` - 1
    ahead."""

    block_n: int
    block_o: int
    block_i: int
    num_warps: int
    num_stages: int

    @property
    def sums_of_thread(self) -> int:
        return self.block_n * self.block_o // (32 * self.num_warps)


def multiply_in_order(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tiles: OrderedTiles, *, gated: bool = False
) -> Tensor:
    """x @ weight.T + bias, dense, in the dtype of x, which must be that of the weights; summed in float32 and rounded
    once. If `gated`, silu of the first half of these outputs times the second half: half as wide. Rows of x and of
    the weights must be dense."""
    rows, inputs = x_NI.shape
    outputs = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    assert weight_OI.shape[1] == inputs
    assert x_NI.dtype == weight_OI.dtype
    assert weight_OI.stride(1) == x_NI.stride(1) == 1
    out_NO = torch.empty((rows, outputs), dtype=x_NI.dtype, device=x_NI.device)
    if rows == 0:
        return out_NO
    programs = triton.cdiv(outputs, tiles.block_o) * triton.cdiv(rows, tiles.block_n)
    multiply_ordered[(programs,)](
        x_NI,
        weight_OI,
        weight_OI if bias_O is None else bias_O,
        out_NO,
        rows,
        outputs,
        inputs,
        x_NI.stride(0),
        weight_OI.stride(0),
        BLOCK_N=tiles.block_n,
        BLOCK_O=tiles.block_o,
        BLOCK_I=tiles.block_i,
        BAND=BAND,
        COMPUTE=compute_dtype(x_NI),
        WHOLE=inputs % tiles.block_i == 0,
        GATED=gated,
        HAS_BIAS=bias_O is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **early_options(x_NI.device),
    )
    return out_NO


@triton.jit(do_not_specialize=["rows"])
def multiply_ordered(
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
    BAND: tl.constexpr,
    COMPUTE: tl.constexpr,
    WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: blocks of BLOCK_O outputs by blocks of BLOCK_N rows, in bands of BAND blocks of outputs. Rows and outputs
    past the end read the last one's again. WHOLE: the inputs are a multiple of BLOCK_I."""
    blocks_o = tl.cdiv(outputs, BLOCK_O)
    in_band = BAND * tl.cdiv(rows, BLOCK_N)
    first_o = tl.program_id(0) // in_band * BAND
    width = tl.minimum(blocks_o - first_o, BAND)
    place = tl.program_id(0) % in_band
    at_O = (first_o + place % width) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_N = place // width * BLOCK_N + tl.arange(0, BLOCK_N)
    at_I = tl.arange(0, BLOCK_I)
    row_O = tl.minimum(at_O, outputs - 1).to(tl.int64)
    row_N = at_N.to(tl.int64)
    weights_OI = weight_OI + row_O[:, None] * weight_stride + at_I[None, :]
    ups_OI = weights_OI + outputs * weight_stride.to(tl.int64)
    x_IN = x_NI + row_N[None, :] * x_stride + at_I[:, None]
    inside_N = at_N < rows
    sum_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    up_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    wait_for_previous(EARLY)
    for first in range(0, inputs, BLOCK_I):
        inside_I = at_I < inputs - first
        if WHOLE:
            rows_IN = tl.load(x_IN + first, inside_N[None, :], 0.0).to(COMPUTE)
            block_OI = tl.load(weights_OI + first).to(COMPUTE)
        else:
            rows_IN = tl.load(x_IN + first, inside_I[:, None] & inside_N[None, :], 0.0).to(COMPUTE)
            block_OI = tl.load(weights_OI + first, inside_I[None, :], 0.0).to(COMPUTE)
        sum_ON = tl.dot(block_OI, rows_IN, sum_ON, input_precision="ieee")
        if GATED:
            if WHOLE:
                up_OI = tl.load(ups_OI + first).to(COMPUTE)
            else:
                up_OI = tl.load(ups_OI + first, inside_I[None, :], 0.0).to(COMPUTE)
            up_ON = tl.dot(up_OI, rows_IN, up_ON, input_precision="ieee")
    let_next_start(EARLY)
    if HAS_BIAS:
        sum_ON += tl.load(bias_O + row_O)[:, None].to(tl.float32)
    if GATED:
        if HAS_BIAS:
            up_ON += tl.load(bias_O + outputs + row_O)[:, None].to(tl.float32)
        sum_ON = sum_ON * tl.sigmoid(sum_ON) * up_ON
    to_ON = out_NO + row_N[None, :] * outputs + at_O[:, None]
    tl.store(to_ON, sum_ON.to(out_NO.dtype.element_ty), (at_O < outputs)[:, None] & inside_N[None, :])
