"""Rotates a step's queries in place, and writes its rotated keys and its values to the paged KV pool. One launch does
what engine/kernels/rotary.py and engine/kernels/kv_write.py do in two.

Legend: N tokens, H query heads, K key/value heads, A = H + 2 * K all heads, D head size, C = D / 2 rotary frequencies,
B heads of a program.

Bytes: each head is read and written once, 2 * A * D * s per token. A token of 32 + 2 * 8 heads of 128 in bfloat16 is 24
KB: 64 tokens are 1.6 MB, less than a launch takes.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.interface import KVTarget
from engine.kernels.early_launch import early_options, let_next_start, wait_for_previous
from engine.kernels.kv_write import quantise
from engine.kernels.rotary import FUSES, PROGRAM_SIZE, turn


def rotate_and_write(
    qkv_NAD: Tensor, rotations_N1C: Tensor, weight_HD: Tensor | None, eps: float, target: KVTarget
) -> None:
    """As rotate_heads_ on the queries. Keys, rotated in the same way, and values are written to the target; in
    `qkv_NAD` they stay unchanged.

    `weight_HD` has the norms of query and key heads.
    """
    tokens, heads, dim = qkv_NAD.shape
    if tokens == 0:
        return
    pool_2KSD, scales_LJKS = target.paged.kv_LJKSD[target.place], target.paged.scales_LJKS
    kv_heads = pool_2KSD.shape[1]
    rotations = torch.view_as_real(rotations_N1C)
    assert qkv_NAD.stride(2) == 1
    assert rotations.stride()[2:] == (2, 1)
    assert weight_HD is None or weight_HD.is_contiguous()
    block = triton.next_power_of_2(dim)
    per_program = min(max(1, PROGRAM_SIZE // block), triton.next_power_of_2(heads))
    rotate_write_heads[(tokens, triton.cdiv(heads, per_program))](
        qkv_NAD,
        rotations,
        qkv_NAD if weight_HD is None else weight_HD,
        pool_2KSD,
        pool_2KSD if scales_LJKS is None else scales_LJKS[target.place],
        target.slots_N,
        eps,
        qkv_NAD.stride(0),
        qkv_NAD.stride(1),
        rotations.stride(0),
        pool_2KSD.stride(1),
        QUERIES=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=block,
        HEADS=per_program,
        HAS_NORM=weight_HD is not None,
        HAS_SCALES=scales_LJKS is not None,
        num_warps=min(max(per_program * block // 256, 1), 4),
        enable_fp_fusion=FUSES,
        **early_options(qkv_NAD.device),
    )


@triton.jit
def rotate_write_heads(
    qkv_NAD,
    rotations_ND,
    weight_HD,
    pool,
    scales,
    slots,
    eps,
    stride_token,
    stride_head,
    rotations_stride,
    pool_stride_head,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid: tokens, blocks of HEADS heads. `pool` and `scales` are one layer, as in write_kv; a token whose slot is
    negative is not written."""
    wait_for_previous(EARLY)
    let_next_start(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    heads_B = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at_D = tl.arange(0, BLOCK)
    turns_B = heads_B < QUERIES + KV_HEADS
    inside_D = (at_D < DIM)[None, :]
    from_BD = qkv_NAD + token * stride_token + heads_B[:, None] * stride_head + at_D[None, :]
    x_BD = tl.load(from_BD, (heads_B < QUERIES + 2 * KV_HEADS)[:, None] & inside_D, 0.0)
    rotation_D = tl.load(rotations_ND + token * rotations_stride + at_D, at_D < DIM, 0.0)
    turned_BD = turn(
        x_BD, turns_B[:, None] & inside_D, heads_B, weight_HD, eps, rotation_D, DIM, BLOCK, HEADS, HAS_NORM
    )
    x_BD = tl.where(turns_B[:, None], turned_BD.to(x_BD.dtype), x_BD)
    tl.store(from_BD, x_BD, (heads_B < QUERIES)[:, None] & inside_D)

    rows_B = (heads_B - QUERIES).to(tl.int64)
    written_B = (rows_B >= 0) & (rows_B < 2 * KV_HEADS) & (slot >= 0)
    if HAS_SCALES:
        x_BD, scale_B = quantise(x_BD, HEADS)
        tl.store(scales + rows_B * (pool_stride_head // DIM) + slot, scale_B, written_B)
    to_BD = pool + rows_B[:, None] * pool_stride_head + slot * DIM + at_D[None, :]
    tl.store(to_BD, x_BD.to(pool.dtype.element_ty), written_B[:, None] & inside_D)
