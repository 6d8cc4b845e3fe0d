"""Writes a step's keys and values to the pool in one launch.

Legend: N tokens of the step, K key/value heads, D head size, S slots.
"""

from __future__ import annotations

import triton
from torch import Tensor

from engine.kernels.kv_write import write_kv
from engine.runner.kv_pool import PagedKV

ELEMENTS = 2048
"""Numbers that one program writes."""


def write_rows(paged: PagedKV, place: int, kv_NJKD: Tensor, slots_N: Tensor) -> None:
    """Row n goes to slot `slots_N[n]` of the pool's layer `place`, or nowhere if that is negative."""
    kv_NJKD = kv_NJKD if kv_NJKD.stride(3) == 1 else kv_NJKD.contiguous()
    pool_2KSD, scales = paged.kv_LJKSD[place], paged.scales_LJKS
    rows, _, kv_heads, dim = kv_NJKD.shape
    block_d = max(16, triton.next_power_of_2(dim))
    block_rows = min(triton.next_power_of_2(2 * kv_heads), max(1, ELEMENTS // block_d))
    write_kv[(rows, triton.cdiv(2 * kv_heads, block_rows))](
        pool_2KSD,
        pool_2KSD if scales is None else scales[place],
        kv_NJKD,
        slots_N,
        kv_NJKD.stride(0),
        kv_NJKD.stride(1),
        kv_NJKD.stride(2),
        pool_2KSD.stride(1),
        NUM_HEADS=kv_heads,
        DIM=dim,
        BLOCK_D=block_d,
        ROWS=block_rows,
        HAS_SCALES=scales is not None,
    )
