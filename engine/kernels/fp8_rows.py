"""Products of rows with fixed weights that are held in fp8 (e4m3): each weight is read once, as a byte.

Legend: N rows of input, I input features, O output features, B blocks of inputs that share a scale.

An fp8 number is exact in 16 bits. Products are taken in the dtype of the rows and summed in float32; the sum over a
block of inputs is multiplied by the scale of its row and block.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.early_launch import early_options, let_next_start, wait_for_previous
from engine.kernels.few_rows import compute_dtype

MOST_ROWS = 256
LEAST_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """A program has `block_o` outputs of at most `block_n` rows and reads `block_i` inputs at a time, `num_stages` - 1
    ahead. `bits`: bfloat16 is made from fp8 by shifts and a product, not by way of float16."""

    block_o: int
    block_n: int
    block_i: int
    num_warps: int
    num_stages: int
    bits: bool


TILES = (
    Fp8Tiles(16, 16, 128, 2, 6, False),
    Fp8Tiles(32, 16, 128, 4, 6, True),
    Fp8Tiles(64, 64, 128, 4, 4, True),
)
"""The quickest is found by timing on the GPU."""


def fits(columns: int, blocks: int) -> bool:
    """Whether the kernel takes scales for each `columns` inputs, `blocks` of them in a row."""
    return blocks == 1 or columns % LEAST_BLOCK == 0


def check_operands(x_NI: Tensor, values_OI: Tensor, scales_OB: Tensor) -> None:
    assert values_OI.shape == (scales_OB.shape[0], x_NI.shape[1])
    assert values_OI.dtype == torch.float8_e4m3fn
    assert scales_OB.dtype == torch.float32
    assert values_OI.stride(1) == x_NI.stride(1) == 1
    assert scales_OB.is_contiguous()


def multiply_fp8(
    x_NI: Tensor, values_OI: Tensor, scales_OB: Tensor, columns: int, bias_O: Tensor | None, tiles: Fp8Tiles
) -> Tensor:
    """x @ (values * scales).T + bias in the dtype of x, rounded once. A scale is for `columns` inputs. All rows must be
    dense."""
    rows, inputs = x_NI.shape
    outputs, blocks = scales_OB.shape
    check_operands(x_NI, values_OI, scales_OB)
    assert fits(columns, blocks)
    out_NO = torch.empty((rows, outputs), dtype=x_NI.dtype, device=x_NI.device)
    if rows == 0:
        return out_NO
    block_n = 8 if rows <= 8 else min(tiles.block_n, triton.next_power_of_2(rows))
    divisor = columns & -columns  # the largest power of two that divides it
    block_i = tiles.block_i if blocks == 1 else min(tiles.block_i, divisor)
    multiply_scaled_rows[(triton.cdiv(outputs, tiles.block_o), triton.cdiv(rows, block_n))](
        x_NI,
        values_OI,
        scales_OB,
        scales_OB if bias_O is None else bias_O,
        out_NO,
        rows,
        outputs,
        inputs,
        blocks,
        columns,
        x_NI.stride(0),
        values_OI.stride(0),
        BLOCK_N=block_n,
        BLOCK_O=tiles.block_o,
        BLOCK_I=block_i,
        COMPUTE=compute_dtype(x_NI),
        BITS=tiles.bits,
        ONE_BLOCK=blocks == 1,
        HAS_BIAS=bias_O is not None,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **early_options(x_NI.device),
    )
    return out_NO


@triton.jit(do_not_specialize=["rows"])
def multiply_scaled_rows(
    x_NI,
    values_OI,
    scales_OB,
    bias_O,
    out_NO,
    rows,
    outputs,
    inputs,
    blocks,
    columns,
    x_stride,
    values_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    COMPUTE: tl.constexpr,
    BITS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: blocks of BLOCK_O outputs, blocks of BLOCK_N rows. Outputs past the end read the last one's weights again.
    BLOCK_I divides `columns`, unless a row has one scale."""
    at_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    at_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_I = tl.arange(0, BLOCK_I)
    row_O = tl.minimum(at_O, outputs - 1).to(tl.int64)
    inside_N = at_N < rows
    from_OI = values_OI + row_O[:, None] * values_stride + at_I[None, :]
    from_IN = x_NI + at_N[None, :].to(tl.int64) * x_stride + at_I[:, None]
    from_O = scales_OB + row_O * blocks
    sum_ON = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    wait_for_previous(EARLY)
    for first in range(0, inputs, BLOCK_I):
        inside_I = at_I < inputs - first
        block_OI = widen(tl.load(from_OI + first, inside_I[None, :], 0.0), COMPUTE, BITS)
        rows_IN = tl.load(from_IN + first, inside_I[:, None] & inside_N[None, :], 0.0).to(COMPUTE)
        if ONE_BLOCK:
            sum_ON = tl.dot(block_OI, rows_IN, sum_ON, input_precision="ieee")
        else:
            scale_O = tl.load(from_O + first // columns)
            sum_ON += tl.dot(block_OI, rows_IN, input_precision="ieee") * scale_O[:, None]
    let_next_start(EARLY)
    if ONE_BLOCK:
        sum_ON *= tl.load(from_O)[:, None]
    if HAS_BIAS:
        sum_ON += tl.load(bias_O + row_O)[:, None].to(tl.float32)
    to_ON = out_NO + at_N[None, :].to(tl.int64) * outputs + at_O[:, None]
    tl.store(to_ON, sum_ON.to(out_NO.dtype.element_ty), (at_O < outputs)[:, None] & inside_N[None, :])


@triton.jit
def widen(x, COMPUTE: tl.constexpr, BITS: tl.constexpr):
    """fp8 to COMPUTE, exactly. fp8's exponent is 120 less than bfloat16's of the same number, also for numbers below
    the normal ones."""
    if tl.bfloat16 == COMPUTE:
        if BITS:
            bits = x.to(tl.uint8, bitcast=True).to(tl.uint16)
            moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 4)
            power = tl.full([1, 1], 1.329227995784916e36, tl.bfloat16)
            return moved.to(tl.bfloat16, bitcast=True) * power
        return x.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    return x.to(COMPUTE)


def multiply_out(values_OI: Tensor, scales_OB: Tensor, columns: int, out_OI: Tensor) -> None:
    """Writes values * scales to the contiguous `out_OI`, multiplied in float32 and rounded once."""
    outputs, inputs = values_OI.shape
    assert out_OI.shape == values_OI.shape
    assert out_OI.is_contiguous()
    assert values_OI.stride(1) == 1
    block = min(1024, triton.next_power_of_2(inputs))
    grid = (outputs, triton.cdiv(inputs, block))
    blocks, stride = scales_OB.shape[1], values_OI.stride(0)
    write_scaled[grid](
        values_OI, scales_OB, out_OI, inputs, blocks, columns, stride, BLOCK_I=block, num_warps=4
    )


@triton.jit
def write_scaled(values_OI, scales_OB, out_OI, inputs, blocks, columns, values_stride, BLOCK_I: tl.constexpr):
    """Grid: outputs, blocks of BLOCK_I inputs."""
    row = tl.program_id(0).to(tl.int64)
    at_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    inside_I = at_I < inputs
    x_I = tl.load(values_OI + row * values_stride + at_I, inside_I, 0.0)
    scale_I = tl.load(scales_OB + row * blocks + at_I // columns, inside_I, 0.0)
    wide_I = x_I.to(tl.float16).to(tl.float32) * scale_I
    tl.store(out_OI + row * inputs + at_I, wide_I.to(out_OI.dtype.element_ty), inside_I)
