"""Products of few rows with fixed weights that are held in fp8 (e4m3), without the matrix units.

Legend: N rows of input, I input features, O output features, W words of four inputs, B blocks of inputs that share a
scale, P parts of a program's inputs, each of EACH.

For the matrix units each weight is made 16 bits wide and brought into their order, which takes longer than reading its
byte. Here a thread multiplies the 16 weights that it read at once as float32 and adds them up by itself, with two and a
half instructions for each. A program asks for its next weights before it uses those at hand, and for its first ones
before the kernel ahead of it has ended, since no kernel writes weights.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.early_launch import early_options, let_next_start, wait_for_previous
from engine.kernels.fp8_rows import check_operands

SUMS_ROWS = 4
"""Each row reads all weights again, from the cache at best."""

EACH = 16
"""Weights that a thread reads at once: 16 bytes."""


@dataclass(frozen=True, slots=True)
class Fp8RowTiles:
    """A program has `block_o` outputs of one row; each of its threads reads EACH inputs of all of them at a time."""

    block_o: int
    num_warps: int


ROW_TILES = (Fp8RowTiles(4, 8), Fp8RowTiles(4, 4), Fp8RowTiles(8, 4))
"""The quickest is found by timing on the GPU."""


def sums_fit(inputs: int, columns: int, blocks: int) -> bool:
    """Whether the kernel takes so many inputs with scales for each `columns` of them, `blocks` in a row."""
    return inputs % EACH == 0 and (blocks == 1 or columns % EACH == 0)


def multiply_fp8_sums(
    x_NI: Tensor,
    values_OI: Tensor,
    scales_OB: Tensor,
    columns: int,
    bias_O: Tensor | None,
    tiles: Fp8RowTiles,
) -> Tensor:
    """x @ (values * scales).T + bias in the dtype of x, summed in float32 and rounded once. A scale is for `columns`
    inputs. All rows must be dense. Every row of x reads all weights, so it is for few."""
    rows, inputs = x_NI.shape
    outputs, blocks = scales_OB.shape
    check_operands(x_NI, values_OI, scales_OB)
    assert values_OI.stride(0) % 4 == 0
    assert sums_fit(inputs, columns, blocks)
    out_NO = torch.empty((rows, outputs), dtype=x_NI.dtype, device=x_NI.device)
    if rows == 0:
        return out_NO
    sum_row[(rows, triton.cdiv(outputs, tiles.block_o))](
        x_NI,
        values_OI.view(torch.int32),
        scales_OB,
        scales_OB if bias_O is None else bias_O,
        out_NO,
        outputs,
        inputs,
        blocks,
        columns,
        x_NI.stride(0),
        values_OI.stride(0) // 4,
        BLOCK_O=tiles.block_o,
        PARTS=32 * tiles.num_warps,
        EACH=EACH,
        ONE_BLOCK=blocks == 1,
        HAS_BIAS=bias_O is not None,
        num_warps=tiles.num_warps,
        **early_options(x_NI.device),
    )
    return out_NO


@triton.jit
def sum_row(
    x_NI,
    words_OW,
    scales_OB,
    bias_O,
    out_NO,
    outputs,
    inputs,
    blocks,
    columns,
    x_stride,
    words_stride,
    BLOCK_O: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: rows, blocks of BLOCK_O outputs; programs of the same weights stand side by side. Outputs past the end read
    the last one's weights again."""
    BLOCK_I: tl.constexpr = PARTS * EACH
    at_O = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_I = tl.arange(0, BLOCK_I)
    part_P = tl.arange(0, PARTS) * EACH
    row_O = tl.minimum(at_O, outputs - 1).to(tl.int64)
    at_W = tl.arange(0, BLOCK_I // 4)
    from_OW = words_OW + row_O[:, None] * words_stride + at_W[None, :]
    words = inputs // 4
    from_I = x_NI + tl.program_id(0).to(tl.int64) * x_stride + at_I
    from_O = scales_OB + row_O * blocks
    sum_OP = tl.zeros([BLOCK_O, PARTS], tl.float32)
    here_OW = tl.load(from_OW, (at_W < words)[None, :], 0)
    wait_for_previous(EARLY)
    for first in range(0, inputs, BLOCK_I):
        after = first // 4 + BLOCK_I // 4
        next_OW = tl.load(from_OW + after, (at_W < words - after)[None, :], 0)
        x_I = tl.load(from_I + first, at_I < inputs - first, 0.0).to(tl.float32)
        products_OI = numbers(here_OW, BLOCK_O, BLOCK_I).to(tl.float32) * x_I[None, :]
        part_OP = tl.sum(tl.reshape(products_OI, [BLOCK_O, PARTS, EACH]), 2)
        if not ONE_BLOCK:
            block_P = tl.minimum((first + part_P) // columns, blocks - 1)
            part_OP *= tl.load(from_O[:, None] + block_P[None, :])
        sum_OP += part_OP
        here_OW = next_OW
    let_next_start(EARLY)
    sum_O = tl.sum(sum_OP, 1)
    if ONE_BLOCK:
        sum_O *= tl.load(from_O)
    if HAS_BIAS:
        sum_O += tl.load(bias_O + row_O).to(tl.float32)
    to_O = out_NO + tl.program_id(0).to(tl.int64) * outputs + at_O
    tl.store(to_O, sum_O.to(out_NO.dtype.element_ty), at_O < outputs)


@triton.jit
def numbers(words_OW, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """The four fp8 numbers of each word, in their order, as float16."""
    pairs = tl.join(byte(words_OW, 0), byte(words_OW, 16))
    other = tl.join(byte(words_OW, 8), byte(words_OW, 24))
    values = tl.reshape(tl.join(pairs, other), [BLOCK_O, BLOCK_I])
    return values.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def byte(words_OW, SHIFT: tl.constexpr):
    return (words_OW >> SHIFT).to(tl.uint8)
