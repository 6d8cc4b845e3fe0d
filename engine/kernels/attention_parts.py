"""Cuts the attention of a ragged step into parts, on the device: which item, which tile of it, which split.

A part is one program's work for one key head. Items of very different lengths stand side by side in a step: decodes
over short and long histories, and the prompts of turns. So each item gets as many splits as its own keys fill, and the
splits of a step read about as many keys each (the work lists of FlashInfer and of FlashAttention 3's scheduler
have the same purpose).

Legend: B items, C entries of a chunk.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _of_item(x_B, index_B, item):
    return tl.sum(tl.where(index_B == item, x_B, 0), 0)


@triton.jit
def _splits(blocks_B, share, MIN_BLOCKS: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """No split is shorter than those of the longest item, which has at most MAX_SPLITS: the step waits for them."""
    least = tl.maximum(tl.cdiv(tl.max(blocks_B, 0), MAX_SPLITS), MIN_BLOCKS)
    return tl.maximum(tl.cdiv(blocks_B, tl.maximum(share, least)), 1)


PARTS = ("part_starts", "item_splits", "slot_starts", "part_items")
"""The kernels' arguments that lie one behind another in one tensor, so that their alignment differs from step to step.
No kernel is compiled for each."""


@triton.jit(do_not_specialize=["num_items", "budget", "window"], do_not_specialize_on_alignment=PARTS)
def cut_into_parts(
    part_starts,
    item_splits,
    slot_starts,
    part_items,
    query_starts,
    kv_lens,
    num_items,
    budget,
    window,
    GROUP: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each item; each of them looks at all items.

    Takes the items with more than LEAST_ROWS and at most MOST_ROWS rows; padding has none. Item b has the parts
    part_starts[b] .. part_starts[b + 1] - 1 of `part_starts` [B + 1], the splits of a tile one after another, and each
    of its tiles has item_splits[b] splits. `part_items` has the item of each part. Tiles with more than one split have
    slots for their partial results from slot_starts[b] on.

    There are at most `budget` slots, and at most max(budget, tiles + budget // 2) parts. Proof: with s blocks a split,
    an item of t tiles and b blocks each makes t * ceil(b / s) parts. If s shares all blocks among `budget` parts, and
    rounding up makes no more than `budget` of them, that is taken. Otherwise s is chosen so that the sum of t * b / s
    is at most `room`. All parts are then at most the tiles and `room` together. Items with two splits or more have at
    most 2 * room parts. `room` is `budget` less the tiles, but at least budget // 2.

    With SPLIT_BLOCKS > 0 splits are that long, and begin at multiples of it: an item has all of its splits or one. The
    longest items are cut, as many as there are slots for; those within a factor of two are cut in their order. So there
    are at most tiles + budget parts, and MAX_SPLITS is no bound.
    """
    item = tl.program_id(0)
    index_B = tl.arange(0, BLOCK_B)
    inside_B = index_B < num_items
    first_B = tl.load(query_starts + index_B, mask=inside_B, other=0)
    num_queries_B = tl.load(query_starts + index_B + 1, mask=inside_B, other=0) - first_B
    kv_len_B = tl.load(kv_lens + index_B, mask=inside_B, other=0)
    rows_B = num_queries_B * GROUP
    mine_B = (rows_B > LEAST_ROWS) & (rows_B <= MOST_ROWS) & (kv_len_B > 0)
    tiles_B = tl.where(mine_B, tl.cdiv(rows_B, BLOCK_M), 0)
    first_key_B = tl.zeros((BLOCK_B,), tl.int32)
    if HAS_WINDOW:
        last_tile_B = tl.maximum(tiles_B - 1, 0) * BLOCK_M // GROUP
        first_key_B = tl.maximum(kv_len_B - num_queries_B + last_tile_B - window + 1, 0)
    blocks_B = tl.where(mine_B, tl.cdiv(kv_len_B, BLOCK_N) - first_key_B // BLOCK_N, 0)
    splits_B = tl.full((BLOCK_B,), 1, tl.int32)
    if SPLIT_BLOCKS > 0:
        all_splits_B = tl.where(mine_B, tl.cdiv(tl.cdiv(kv_len_B, BLOCK_N), SPLIT_BLOCKS), 0)
        if (
            HAS_WINDOW
        ):  # a reach may begin within a split, and the first tile's be some blocks longer than the last's
            longest_B = tl.cdiv(blocks_B + tl.cdiv(BLOCK_M, BLOCK_N), SPLIT_BLOCKS) + 1
            all_splits_B = tl.minimum(all_splits_B, longest_B)
        left = budget + tl.zeros((), tl.int32)
        least = tl.full((), 1, tl.int32)
        while 2 * least <= tl.max(all_splits_B, 0):
            least *= 2
        while least > 1:
            alike_B = (all_splits_B >= least) & (all_splits_B < 2 * least)
            slots_of_B = tl.where(alike_B, tiles_B * all_splits_B, 0)
            fits_B = alike_B & (tl.cumsum(slots_of_B, 0) <= left)
            splits_B = tl.where(fits_B, all_splits_B, splits_B)
            left -= tl.sum(tl.where(fits_B, slots_of_B, 0), 0)
            least //= 2
    elif MAX_SPLITS > 1:
        all_blocks = tl.sum(tiles_B * blocks_B, 0)
        room = tl.maximum(budget - tl.sum(tiles_B, 0), budget // 2)
        splits_B = _splits(blocks_B, tl.cdiv(all_blocks, budget), MIN_BLOCKS, MAX_SPLITS)
        if tl.sum(tiles_B * splits_B, 0) > budget:
            splits_B = _splits(blocks_B, tl.cdiv(all_blocks, room), MIN_BLOCKS, MAX_SPLITS)
    parts_B = tiles_B * splits_B
    slots_B = tl.where(splits_B > 1, parts_B, 0)
    starts_B = tl.cumsum(parts_B, 0) - parts_B
    if item == 0:
        tl.store(part_starts + index_B, starts_B, mask=inside_B)
        tl.store(part_starts + num_items, tl.sum(parts_B, 0))
        tl.store(item_splits + index_B, splits_B, mask=inside_B)
        tl.store(slot_starts + index_B, tl.cumsum(slots_B, 0) - slots_B, mask=inside_B)
    start = _of_item(starts_B, index_B, item)
    count = _of_item(parts_B, index_B, item)
    offsets_C = tl.arange(0, CHUNK)
    for at in tl.range(0, count, CHUNK):
        tl.store(part_items + start + at + offsets_C, item, mask=at + offsets_C < count)
