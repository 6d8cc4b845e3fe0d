"""Writes a step's keys and values to the paged KV pool, in its own dtype or quantised.

Legend: N tokens of the step, K key/value heads, R rows of a program (one token's heads, keys then values), D head size
padded to a power of two.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

FP8_LARGEST = tl.constexpr(448.0)
"""The largest float8_e4m3fn."""


@triton.jit
def _round_to_fp8(x_RD):
    """Rounds to the nearest float8_e4m3fn, ties to even, for |x| <= 448. The cast after it is then exact, so that the
    interpreter, whose cast drops carries, gives the same bits as a GPU. Adding 1.5 * 2^23 steps leaves whole steps."""
    exponent_RD = (x_RD.to(tl.int32, bitcast=True) >> 23) & 0xFF
    steps_RD = (tl.maximum(exponent_RD, 127 - 6) + (23 - 3)) << 23
    magic_RD = 1.5 * steps_RD.to(tl.float32, bitcast=True)
    return (x_RD + magic_RD) - magic_RD


@triton.jit
def quantise(x_RD, ROWS: tl.constexpr):
    """Rows divided by their largest magnitude / 448, ready for the cast to float8_e4m3fn, and those divisors."""
    x_RD = x_RD.to(tl.float32)
    largest_R = tl.max(tl.abs(x_RD), 1)
    scale_R = tl.where(largest_R > 0.0, tl.div_rn(largest_R, tl.full((ROWS,), FP8_LARGEST, tl.float32)), 1.0)
    x_RD = tl.clamp(tl.div_rn(x_RD, scale_R[:, None]), -FP8_LARGEST, FP8_LARGEST)
    return _round_to_fp8(x_RD), scale_R


@triton.jit
def write_kv(
    pool,
    scales,
    kv,
    slots,
    kv_stride_row,
    kv_stride_part,
    kv_stride_head,
    pool_stride_head,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Grid: tokens, blocks of ROWS of their 2 * NUM_HEADS heads. `kv` [N, 2, K, DIM] is strided, with dense heads;
    `pool` is one layer [2, K, slots, DIM], `scales` [2, K, slots] belongs to it. A token whose slot is negative is not
    written. With scales a head is stored divided by its largest magnitude / 448."""
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    rows_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part_R = rows_R // NUM_HEADS
    head_R = rows_R % NUM_HEADS
    offsets_D = tl.arange(0, BLOCK_D)
    inside_RD = (rows_R < 2 * NUM_HEADS)[:, None] & (offsets_D < DIM)[None, :]
    from_R = token.to(tl.int64) * kv_stride_row + part_R * kv_stride_part + head_R * kv_stride_head
    x_RD = tl.load(kv + from_R[:, None] + offsets_D[None, :], mask=inside_RD, other=0.0)
    to_R = rows_R.to(tl.int64) * pool_stride_head + slot * DIM
    written_R = (rows_R < 2 * NUM_HEADS) & (slot >= 0)
    if HAS_SCALES:
        x_RD, scale_R = quantise(x_RD, ROWS)
        at_R = rows_R.to(tl.int64) * (pool_stride_head // DIM) + slot
        tl.store(scales + at_R, scale_R, mask=written_R)
    written_RD = written_R[:, None] & (offsets_D < DIM)[None, :]
    tl.store(pool + to_R[:, None] + offsets_D[None, :], x_RD.to(pool.dtype.element_ty), mask=written_RD)
