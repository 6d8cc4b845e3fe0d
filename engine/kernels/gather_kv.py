"""Copies the keys and values of some items from their pages to one dense tensor, for kernels that read no pages.

Legend: T tokens of all items one after another, B items, K key/value heads, S slots, D head size padded to a power of
two.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["pages", "kv_lens", "key_starts"]
)
def gather_kv(
    dense,
    pool,
    scales,
    pages,
    kv_lens,
    key_starts,
    dense_stride_head,
    pool_stride_head,
    pages_stride,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Grid: blocks of BLOCK_T tokens of the longest item, items, 2 * K heads (keys, then values).

    `pool` is one layer [2, K, S, DIM], `scales` [2, K, S] belongs to it; `dense` is [2, K, T, DIM]. Item b's tokens go
    to key_starts[b] and on. A page below 0 is read as the first: nobody looks at a step of padding. The tables of a run
    begin anywhere in a step's, which must not make a kernel of its own.
    """
    item = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens + item)
    at_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside_T = at_T < kv_len
    page_T = tl.load(pages + item.to(tl.int64) * pages_stride + at_T // PAGE_SIZE, mask=inside_T, other=0)
    slot_T = tl.maximum(page_T, 0).to(tl.int64) * PAGE_SIZE + at_T % PAGE_SIZE
    at_D = tl.arange(0, BLOCK_D)
    inside_TD = inside_T[:, None] & (at_D < DIM)[None, :]
    from_TD = head * pool_stride_head + slot_T[:, None] * DIM + at_D[None, :]
    x_TD = tl.load(pool + from_TD, mask=inside_TD, other=0.0)
    if HAS_SCALES:
        scale_T = tl.load(scales + head * (pool_stride_head // DIM) + slot_T, mask=inside_T, other=1.0)
        x_TD = x_TD.to(tl.float32) * scale_T[:, None]
    row_T = (tl.load(key_starts + item) + at_T).to(tl.int64)
    to_TD = head * dense_stride_head + row_T[:, None] * DIM + at_D[None, :]
    tl.store(dense + to_TD, x_TD.to(dense.dtype.element_ty), mask=inside_TD)
