"""Rotates query and key heads by their positions, in place, after normalising each head if it has a norm.

Legend: N tokens, H heads, D head size, C = D / 2 rotary frequencies, B heads of a program.

Bytes: each head is read and written once, 2 * H * D * s per token, plus 8 * C of rotations for each B heads, which come
from the L2 cache except for the first. A token of 40 heads of 128 in bfloat16 is 20 KB: 64 tokens are 1.3 MB, less than
a launch takes; 2048 tokens are 42 MB, 13 us at 3.3 TB/s.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FUSES = False
"""Whether the compiler may round a product and a sum once. It may not: every kernel must rotate the same head to the
same bits."""

PROGRAM_SIZE = 1024
"""Numbers that a program of 128 threads rotates: one access of 16 bytes per thread in bfloat16."""


def rotate_heads_(
    x_NHD: Tensor, rotations_N1C: Tensor, weight_HD: Tensor | None = None, eps: float = 0.0
) -> None:
    """Normalises each head if there are weights (as rms_norm, but not rounded before the rotation), then rotates
    interleaved pairs, in float32, in place. Each head must be dense; N and H may be strided. Rotations are complex64.
    """
    tokens, heads, dim = x_NHD.shape
    if tokens == 0:
        return
    rotations = torch.view_as_real(rotations_N1C)
    assert x_NHD.stride(2) == 1
    assert rotations.stride()[2:] == (2, 1)
    assert weight_HD is None or weight_HD.is_contiguous()
    block = triton.next_power_of_2(dim)
    per_program = min(max(1, PROGRAM_SIZE // block), triton.next_power_of_2(heads))
    rotate_pairs[(tokens, triton.cdiv(heads, per_program))](
        x_NHD,
        rotations,
        x_NHD if weight_HD is None else weight_HD,
        eps,
        x_NHD.stride(0),
        x_NHD.stride(1),
        rotations.stride(0),
        heads,
        DIM=dim,
        BLOCK=block,
        HEADS=per_program,
        HAS_NORM=weight_HD is not None,
        num_warps=min(max(per_program * block // 256, 1), 4),
        enable_fp_fusion=FUSES,
    )


@triton.jit
def turn(
    x_BD,
    inside_BD,
    heads_B,
    weight_HD,
    eps,
    rotation_D,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalises heads if they have a norm, and rotates them, in float32. A rotation's cosine and sine lie side by
    side, like the features of a pair."""
    turned_BD = x_BD.to(tl.float32)
    if HAS_NORM:
        weight_BD = tl.load(weight_HD + heads_B[:, None] * DIM + tl.arange(0, BLOCK)[None, :], inside_BD, 0.0)
        mean_B = tl.sum(turned_BD * turned_BD, 1) / DIM
        turned_BD = turned_BD * (1.0 / tl.sqrt_rn(mean_B + eps))[:, None] * weight_BD.to(tl.float32)
    cos_BC, sin_BC = tl.split(tl.reshape(rotation_D, [1, BLOCK // 2, 2]))
    real_BC, imaginary_BC = tl.split(tl.reshape(turned_BD, [HEADS, BLOCK // 2, 2]))
    turned_BC2 = tl.join(
        real_BC * cos_BC - imaginary_BC * sin_BC,
        real_BC * sin_BC + imaginary_BC * cos_BC,
    )
    return tl.reshape(turned_BC2, [HEADS, BLOCK])


@triton.jit
def rotate_pairs(
    x_NHD,
    rotations_ND,
    weight_HD,
    eps,
    x_stride_token,
    x_stride_head,
    rotations_stride,
    heads,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Grid: tokens, blocks of HEADS heads."""
    token = tl.program_id(0).to(tl.int64)
    heads_B = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at_D = tl.arange(0, BLOCK)
    inside_BD = (heads_B < heads)[:, None] & (at_D < DIM)[None, :]
    from_BD = x_NHD + token * x_stride_token + heads_B[:, None] * x_stride_head + at_D[None, :]
    x_BD = tl.load(from_BD, inside_BD, 0.0)
    rotation_D = tl.load(rotations_ND + token * rotations_stride + at_D, at_D < DIM, 0.0)
    turned_BD = turn(x_BD, inside_BD, heads_B, weight_HD, eps, rotation_D, DIM, BLOCK, HEADS, HAS_NORM)
    tl.store(from_BD, turned_BD.to(x_BD.dtype), inside_BD)
