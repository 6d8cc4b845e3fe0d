"""Copies pages of a KV pool to pinned host memory and back, in one launch and without a copy in between.

A few programs read and write host memory themselves, over the link. Many bytes are in flight, but most multiprocessors
stay with the steps beside. A copy engine would need the pages gathered in device memory first, which costs the memory's
bandwidth twice and takes room there.

Legend: L layers, K key/value heads, P pages of the pool, n pages copied, p tokens of a page, D head size. A row is one
layer's keys or values of one head; a unit is a page of a row, W words of 4 bytes, which is dense on both sides.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 16
WORDS = 4096
"""Words that a program has in flight. All programs together have 256 KB: by Little's law a link of 64 GB/s and 2 us
needs half of it."""


class TritonPageCopier:
    """A PageCopier (engine/runner/page_copier.py) for GPUs."""

    def save(self, pool_L2KPpD: Tensor, pages_n: Tensor, host_L2KnpD: Tensor) -> None:
        _copy(pool_L2KPpD, pages_n, host_L2KnpD, to_host=True)

    def load(self, pool_L2KPpD: Tensor, pages_n: Tensor, host_L2KnpD: Tensor) -> None:
        _copy(pool_L2KPpD, pages_n, host_L2KnpD, to_host=False)


def _copy(pool_L2KPpD: Tensor, pages_n: Tensor, host_L2KnpD: Tensor, *, to_host: bool) -> None:
    layers, two, heads, num_pages, tokens, dim = pool_L2KPpD.shape
    unit_bytes = tokens * dim * pool_L2KPpD.element_size()
    assert unit_bytes % 4 == 0, "a head's part of a page is whole words"
    assert pool_L2KPpD.is_contiguous()
    assert host_L2KnpD.is_contiguous()
    assert host_L2KnpD.shape == (layers, two, heads, len(pages_n), tokens, dim)
    words = unit_bytes // 4
    block = triton.next_power_of_2(words)
    units = layers * two * heads * len(pages_n)
    if not units:
        return
    per_step = min(max(1, WORDS // block), triton.next_power_of_2(units))
    copy_units[(min(PROGRAMS, triton.cdiv(units, per_step)),)](
        pool_L2KPpD.view(torch.uint8).flatten().view(torch.int32),
        host_L2KnpD.view(torch.uint8).flatten().view(torch.int32),
        pages_n,
        len(pages_n),
        units,
        num_pages * words,
        WORDS_OF_UNIT=words,
        BLOCK_W=block,
        UNITS=per_step,
        TO_HOST=to_host,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count", "units"])
def copy_units(
    pool,
    host,
    pages,
    count,
    units,
    row_words,
    WORDS_OF_UNIT: tl.constexpr,
    BLOCK_W: tl.constexpr,
    UNITS: tl.constexpr,
    TO_HOST: tl.constexpr,
):
    """The grid's programs take UNITS units at a time in turn. Unit u is page u % count of row u // count; in `host` the
    units lie one behind another. `row_words` is the pool's distance between rows."""
    at_W = tl.arange(0, BLOCK_W)
    step = tl.num_programs(0) * UNITS
    for first in tl.range(tl.program_id(0) * UNITS, units, step):
        unit_U = first + tl.arange(0, UNITS)
        inside_U = unit_U < units
        page_U = tl.load(pages + unit_U % count, inside_U, 0).to(tl.int64)
        there_U = (unit_U // count).to(tl.int64) * row_words + page_U * WORDS_OF_UNIT
        here_U = unit_U.to(tl.int64) * WORDS_OF_UNIT
        inside_UW = inside_U[:, None] & (at_W < WORDS_OF_UNIT)[None, :]
        pool_UW = pool + there_U[:, None] + at_W[None, :]
        host_UW = host + here_U[:, None] + at_W[None, :]
        if TO_HOST:
            tl.store(host_UW, tl.load(pool_UW, inside_UW), inside_UW)
        else:
            tl.store(pool_UW, tl.load(host_UW, inside_UW), inside_UW)
