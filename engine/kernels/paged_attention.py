"""Attention over the paged KV pool: extends, decodes and verifies of a step.

The queries of an item that share a key head are packed into tiles of BLOCK_M rows: row r is query r // GROUP, head
r % GROUP of the group. A part is a tile, or a split of one; each program takes one part and key head. Keys are taken
in blocks of BLOCK_N with a running maximum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018;
Dao et al., "FlashAttention", 2022). A tile with many keys is cut into splits that run side by side ("Flash-Decoding",
Dao et al., 2023); the last of them to end joins their partial sums.

With SPLIT_BLOCKS a row's result does not depend on what is computed beside it: splits begin at multiples of
SPLIT_BLOCKS, whoever computes them, each has sums of its own, and these are merged from the first to the last. A tile
is then cut into all of its splits, or into none; its one program merges as it goes along. Blocks that a row does not
see leave its sums as they are. All shapes of tiles must have the same BLOCK_N, and sum along a row in the same order.

Legend: M rows of a tile, N keys of a block, D head size padded to a power of two, S splits, J columns.
Scores and their maxima are in units of log 2.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.attention_parts import PARTS

JOIN_STAGES = tl.constexpr(5)
"""One more than the number of a tile's partial outputs that are in flight at once."""

LOWEST = tl.constexpr(-1.0e30)
"""Where maxima begin: below every score, and finite, so that no difference of two maxima is NaN."""


@triton.jit
def _load_pages(
    pages,
    block,
    first_key,
    last_key,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """The page of each key of a block, or of the whole block if it lies in one page. Keys outside the reach get the
    page of the nearest key in reach. Unsigned division is used because it is one instruction, signed division several.
    """
    keys_N = block * BLOCK_N
    if PAGE_SIZE % BLOCK_N != 0:
        keys_N += tl.arange(0, BLOCK_N)
    if HAS_WINDOW:
        keys_N = tl.maximum(keys_N, first_key)
    return tl.load(pages + tl.minimum(keys_N, last_key).to(tl.uint32) // PAGE_SIZE)


@triton.jit
def _power_of_two_below(x):
    """The power of two at or below a float32 that is not negative: its exponent alone. For subnormal numbers, the least
    normal one."""
    return tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 1 << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_rows(
    rows_ND,
    offsets_D,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    if BLOCK_D != DIM:  # noqa: SIM108 (a constant: only one of the two is compiled)
        x_ND = tl.load(rows_ND, mask=offsets_D[None, :] < DIM, other=0.0)
    else:
        x_ND = tl.load(rows_ND)
    if HAS_SCALES and tl.bfloat16 == COMPUTE:
        x_ND = x_ND.to(tl.float32)  # on sm_90 the direct way from fp8 to bfloat16 is four times slower
    return x_ND.to(COMPUTE)


@triton.jit
def _attend_block(
    acc_MD,
    max_M,
    sum_M,
    q_MD,
    q_size_M,
    position_M,
    page,
    block,
    first_key,
    last_key,
    keys,
    values,
    key_scales,
    value_scales,
    score_scale,
    cap,
    window,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds one block of keys to the running sums. Unmasked, every row sees every key of it. Keys out of reach must not
    be read. The nearest key in reach is read in their place, and masked."""
    offsets_D = tl.arange(0, BLOCK_D)
    key_N = block * BLOCK_N + tl.arange(0, BLOCK_N)
    near_N = key_N
    if MASKED:
        near_N = tl.minimum(key_N, last_key)
        if HAS_WINDOW:
            near_N = tl.maximum(near_N, first_key)
    if PAGE_SIZE % BLOCK_N == 0:
        start = page.to(tl.int64) * PAGE_SIZE + block * BLOCK_N % PAGE_SIZE
        keys += start * DIM
        values += start * DIM
        slot_N = near_N - block * BLOCK_N
        if HAS_SCALES:
            key_scales += start
            value_scales += start
    else:
        if WIDE:
            page = page.to(tl.int64)
        slot_N = page * PAGE_SIZE + (near_N.to(tl.uint32) % PAGE_SIZE).to(tl.int32)
    offsets_ND = slot_N[:, None] * DIM + offsets_D[None, :]
    k_ND = _load_rows(keys + offsets_ND, offsets_D, DIM, BLOCK_D, q_MD.dtype, HAS_SCALES)
    scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if HAS_SCALES:
        scores_MN *= tl.load(key_scales + slot_N)[None, :] * q_size_M[:, None]
    if HAS_CAP:
        # tanh(x) = 1 - 2 / (1 + e^2x); score_scale holds scale / cap * 2 * log2(e), cap is in units of log 2.
        scores_MN = cap - 2.0 * cap / (1.0 + tl.exp2(scores_MN * score_scale))
    if MASKED:
        seen_MN = key_N[None, :] <= position_M[:, None]
        if HAS_WINDOW:
            seen_MN &= key_N[None, :] > position_M[:, None] - window
        scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
    if HAS_CAP:
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
        p_MN = tl.exp2(scores_MN - new_max_M[:, None])
    else:
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * score_scale)
        p_MN = tl.exp2(scores_MN * score_scale - new_max_M[:, None])
    decay_M = tl.exp2(max_M - new_max_M)
    sum_M = sum_M * decay_M + tl.sum(p_MN, 1)
    acc_MD = acc_MD * decay_M[:, None]
    v_ND = _load_rows(values + offsets_ND, offsets_D, DIM, BLOCK_D, COMPUTE, HAS_SCALES)
    if HAS_SCALES:
        p_MN *= tl.load(value_scales + slot_N)[None, :]
    acc_MD = tl.dot(p_MN.to(COMPUTE), v_ND, acc_MD, input_precision="ieee")
    return acc_MD, new_max_M, sum_M


@triton.jit
def _merge(acc_MD, max_M, sum_M, next_MD, next_max_M, next_sum_M):
    """The sums of two stretches of keys, the second behind the first. The order of roundings is written out: a compiler
    may fuse a product with a sum, and in another kernel do otherwise. Empty sums on either side change nothing."""
    new_max_M = tl.maximum(max_M, next_max_M)
    decay_M = tl.exp2(max_M - new_max_M)
    next_decay_M = tl.exp2(next_max_M - new_max_M)
    sum_M = tl.fma(sum_M, decay_M, next_sum_M * next_decay_M)
    acc_MD = tl.fma(acc_MD, tl.broadcast_to(decay_M[:, None], acc_MD.shape), next_MD * next_decay_M[:, None])
    return acc_MD, new_max_M, sum_M


@triton.jit
def _end_split(block, whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M, SPLIT_BLOCKS: tl.constexpr):
    """If the block was the last of its split, the split's sums go to the whole, and the next split begins."""
    if (block + 1) % SPLIT_BLOCKS == 0:
        whole_MD, whole_max_M, whole_sum_M = _merge(whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M)
        acc_MD = tl.zeros_like(acc_MD)
        max_M = tl.full(max_M.shape, LOWEST, tl.float32)
        sum_M = tl.zeros_like(sum_M)
    return whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M


@triton.jit
def _merge_splits(
    out,
    out_M,
    alive_M,
    partials,
    sums,
    first_part,
    num_used,
    first_max_M,
    first_sum_M,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    JOIN_D: tl.constexpr,
):
    """As `_join_splits`, by `_merge`, behind sums that have no output."""
    rows_M = tl.arange(0, BLOCK_M)
    for start in tl.range(0, BLOCK_D, JOIN_D):
        column_J = start + tl.arange(0, JOIN_D)
        acc_MJ = tl.zeros((BLOCK_M, JOIN_D), tl.float32)
        max_M = first_max_M
        sum_M = first_sum_M
        for split in tl.range(0, num_used, num_stages=JOIN_STAGES):
            part = first_part + split
            at_MJ = (part * BLOCK_M + rows_M)[:, None] * BLOCK_D + column_J[None, :]
            part_MJ = tl.load(partials + at_MJ, mask=alive_M[:, None], other=0.0, cache_modifier=".cg")
            part_max_M = tl.load(sums + part * 2 * BLOCK_M + rows_M, cache_modifier=".cg")
            part_sum_M = tl.load(sums + part * 2 * BLOCK_M + BLOCK_M + rows_M, cache_modifier=".cg")
            acc_MJ, max_M, sum_M = _merge(acc_MJ, max_M, sum_M, part_MJ, part_max_M, part_sum_M)
        mean_MJ = (acc_MJ / sum_M[:, None]).to(out.dtype.element_ty)
        inside_MJ = alive_M[:, None] & (column_J < DIM)[None, :]
        tl.store(out + out_M[:, None] + column_J[None, :], mean_MJ, mask=inside_MJ)


@triton.jit
def _join_splits(
    out,
    out_M,
    alive_M,
    partials,
    sums,
    first_part,
    num_used,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    JOIN_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Writes the weighted mean of a tile's partial outputs, each of its own softmax, JOIN_D columns at a time. Reads
    bypass the first-level cache, which may not have what other programs wrote."""
    rows_M = tl.arange(0, BLOCK_M)
    splits_S = tl.arange(0, MAX_SPLITS)
    at_SM = (first_part + splits_S)[:, None] * (2 * BLOCK_M) + rows_M[None, :]
    used_SM = (splits_S < num_used)[:, None]
    max_SM = tl.load(sums + at_SM, mask=used_SM, other=LOWEST, cache_modifier=".cg")
    sum_SM = tl.load(sums + at_SM + BLOCK_M, mask=used_SM, other=0.0, cache_modifier=".cg")
    max_M = tl.max(max_SM, 0)
    sum_M = tl.sum(sum_SM * tl.exp2(max_SM - max_M[None, :]), 0)
    for start in tl.range(0, BLOCK_D, JOIN_D):
        column_J = start + tl.arange(0, JOIN_D)
        acc_MJ = tl.zeros((BLOCK_M, JOIN_D), tl.float32)
        for split in tl.range(0, num_used, num_stages=JOIN_STAGES):
            part = first_part + split
            at_MJ = (part * BLOCK_M + rows_M)[:, None] * BLOCK_D + column_J[None, :]
            part_MJ = tl.load(partials + at_MJ, mask=alive_M[:, None], other=0.0, cache_modifier=".cg")
            part_max_M = tl.load(sums + part * 2 * BLOCK_M + rows_M, cache_modifier=".cg")
            acc_MJ += tl.exp2(part_max_M - max_M)[:, None] * part_MJ
        mean_MJ = (acc_MJ / sum_M[:, None]).to(out.dtype.element_ty)
        inside_MJ = alive_M[:, None] & (column_J < DIM)[None, :]
        tl.store(out + out_M[:, None] + column_J[None, :], mean_MJ, mask=inside_MJ)


@triton.jit(do_not_specialize=["num_items", "pages_stride", "window"], do_not_specialize_on_alignment=PARTS)
def paged_attention(
    out,
    q,
    kv,
    scales,
    pages,
    query_starts,
    kv_lens,
    part_starts,
    item_splits,
    slot_starts,
    part_items,
    sinks,
    partials,
    sums,
    counters,
    num_items,
    q_stride_row,
    q_stride_head,
    kv_stride_part,
    kv_stride_head,
    pages_stride,
    score_scale,
    cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOIN_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    SPLIT_BLOCKS: tl.constexpr,
    Q_FACTOR: tl.constexpr,
    COMPUTE: tl.constexpr,
    SCORES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Writes `out`, dense [rows, heads, DIM]; rows of no part are left as they are.

    `kv` is one layer of the pool [2, K, slots, DIM], and `scales` [2, K, slots] belongs to it. Parts come from
    engine/kernels/attention_parts.py, which explains `part_starts`, `item_splits`, `slot_starts` and `part_items`. The
    grid has room for each part and key head; programs that find no part end at once. A split has at least MIN_BLOCKS
    blocks, but the last of a tile may have fewer. SPLIT_BLOCKS: the blocks of every split, 0 if they are as many as the
    step needs. A tile with a single split writes the output itself. Otherwise `partials` [slots * K, M, D] and `sums`
    [slots * K, 2, M] hold the result of each split, and `counters`, zero before and after, count how many splits of a
    tile are done. MAX_SPLITS is a power of two that no item exceeds, and 1 where nothing is cut; with SPLIT_BLOCKS only
    that matters. Q_FACTOR is the sign of the scores' scale: -1, 0 or 1. COMPUTE is the dtype of products, SCORES that
    of queries by keys: float16 holds keys in fp8 exactly, by one instruction, and each query is scaled into its range.
    WIDE: a head's offsets need 64 bits. score_scale and cap hold log2(e), see _attend_block.
    """
    num_parts = tl.load(part_starts + num_items)
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    if program // KV_HEADS >= num_parts:
        return
    part = num_parts - 1 - program // KV_HEADS  # an item's last tile sees most keys: begin with it
    item = tl.load(part_items + part)
    part_of_item = part - tl.load(part_starts + item)
    num_splits = 1
    if MAX_SPLITS > 1:
        num_splits = tl.load(item_splits + item)
    tile_of_item = part_of_item // num_splits
    split = part_of_item % num_splits
    first_row = tl.load(query_starts + item)
    num_queries = tl.load(query_starts + item + 1) - first_row
    kv_len = tl.load(kv_lens + item)
    history = kv_len - num_queries

    # The keys that any row sees, and among their blocks those that every row sees in full.
    first_position = history + tile_of_item * BLOCK_M // GROUP
    last_position = tl.minimum(history + (tile_of_item * BLOCK_M + BLOCK_M - 1) // GROUP, kv_len - 1)
    last_key = last_position
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(0, first_position - window + 1)
    begin = first_key // BLOCK_N
    end = last_key // BLOCK_N + 1
    num_used = 1
    if SPLIT_BLOCKS > 0:
        if num_splits > 1:
            first_split = begin // SPLIT_BLOCKS
            num_used = tl.cdiv(end, SPLIT_BLOCKS) - first_split
            if split >= num_used:
                return
            begin = tl.maximum(begin, (first_split + split) * SPLIT_BLOCKS)
            end = tl.minimum(end, (first_split + split + 1) * SPLIT_BLOCKS)
    elif MAX_SPLITS > 1:
        share = tl.maximum(tl.cdiv(end - begin, num_splits), MIN_BLOCKS)
        num_used = tl.cdiv(end - begin, share)
        if split >= num_used:
            return
        begin += split * share
        end = tl.minimum(end, begin + share)
    # Small tiles are bound by memory, so masking every block costs nothing; large ones are bound by arithmetic. Blocks
    # apart come last, also those where a window begins: that is another order.
    APART: tl.constexpr = BLOCK_M > 64 and (SPLIT_BLOCKS == 0 or not HAS_WINDOW)
    full_begin = begin
    full_end = end
    if APART:
        full_end = tl.minimum(tl.maximum((first_position + 1) // BLOCK_N, begin), end)
    if APART and HAS_WINDOW:
        full_begin = tl.maximum(tl.cdiv(tl.maximum(0, last_position - window + 1), BLOCK_N), begin)
        full_begin = tl.minimum(full_begin, full_end)

    rows_M = tile_of_item * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets_D = tl.arange(0, BLOCK_D)
    alive_M = rows_M < num_queries * GROUP
    head_M = kv_head * GROUP + rows_M % GROUP
    row_M = (first_row + rows_M // GROUP).to(tl.int64)
    position_M = tl.minimum(history + rows_M // GROUP, kv_len - 1)
    q_M1 = (row_M * q_stride_row + head_M * q_stride_head)[:, None]
    inside_MD = alive_M[:, None] & (offsets_D[None, :] < DIM)
    q_MD = tl.load(q + q_M1 + offsets_D[None, :], mask=inside_MD, other=0.0).to(COMPUTE)
    if Q_FACTOR != 1:
        q_MD = (q_MD.to(tl.float32) * Q_FACTOR).to(COMPUTE)
    q_size_M = tl.full((BLOCK_M,), 1.0, tl.float32)
    if HAS_SCALES:
        q_size_M = _power_of_two_below(tl.max(tl.abs(q_MD.to(tl.float32)), 1))
        q_MD = (q_MD.to(tl.float32) / q_size_M[:, None]).to(SCORES)

    acc_MD = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    max_M = tl.full((BLOCK_M,), LOWEST, tl.float32)
    sum_M = tl.zeros((BLOCK_M,), tl.float32)
    first_max_M = max_M  # of what comes before all keys
    first_sum_M = sum_M
    if HAS_SINKS and (SPLIT_BLOCKS > 0 or split == 0):
        sink_M = tl.load(sinks + head_M, mask=alive_M, other=0.0).to(tl.float32)
        first_max_M = tl.maximum(sink_M * 1.4426950408889634, LOWEST)
        first_sum_M += 1.0
    whole_MD = acc_MD  # of the splits that are done
    whole_max_M = max_M
    whole_sum_M = sum_M
    if SPLIT_BLOCKS == 0:
        max_M = first_max_M
        sum_M = first_sum_M
    elif num_used == 1:
        whole_max_M = first_max_M
        whole_sum_M = first_sum_M

    pages += item.to(tl.int64) * pages_stride
    keys = kv + kv_head.to(tl.int64) * kv_stride_head
    values = keys + kv_stride_part
    key_scales = scales
    value_scales = scales
    if HAS_SCALES:
        key_scales = scales + kv_head.to(tl.int64) * (kv_stride_head // DIM)
        value_scales = key_scales + kv_stride_part // DIM
    page = _load_pages(pages, full_begin, first_key, last_key, PAGE_SIZE, BLOCK_N, HAS_WINDOW)
    for block in tl.range(full_begin, full_end):
        next_page = _load_pages(pages, block + 1, first_key, last_key, PAGE_SIZE, BLOCK_N, HAS_WINDOW)
        acc_MD, max_M, sum_M = _attend_block(
            acc_MD, max_M, sum_M, q_MD, q_size_M, position_M, page, block, first_key, last_key,
            keys, values, key_scales, value_scales, score_scale, cap, window,
            DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, COMPUTE, HAS_SCALES, HAS_CAP, HAS_WINDOW, WIDE, not APART,
        )  # fmt: skip
        page = next_page
        if SPLIT_BLOCKS > 0:
            whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M = _end_split(
                block, whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M, SPLIT_BLOCKS
            )
    num_apart = 0
    if APART:
        num_apart = end - begin - (full_end - full_begin)
    for index in tl.range(0, num_apart):
        block = begin + index
        if block >= full_begin:
            block += full_end - full_begin
        page = _load_pages(pages, block, first_key, last_key, PAGE_SIZE, BLOCK_N, HAS_WINDOW)
        acc_MD, max_M, sum_M = _attend_block(
            acc_MD, max_M, sum_M, q_MD, q_size_M, position_M, page, block, first_key, last_key,
            keys, values, key_scales, value_scales, score_scale, cap, window,
            DIM, BLOCK_D, PAGE_SIZE, BLOCK_N, COMPUTE, HAS_SCALES, HAS_CAP, HAS_WINDOW, WIDE, True,
        )  # fmt: skip
        if SPLIT_BLOCKS > 0:
            whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M = _end_split(
                block, whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M, SPLIT_BLOCKS
            )
    if SPLIT_BLOCKS > 0:
        acc_MD, max_M, sum_M = _merge(whole_MD, whole_max_M, whole_sum_M, acc_MD, max_M, sum_M)

    out_M = (row_M * (KV_HEADS * GROUP) + head_M) * DIM
    if MAX_SPLITS > 1 and num_used > 1:
        first_slot = tl.load(slot_starts + item) + tile_of_item * num_splits
        counter = first_slot * KV_HEADS + kv_head * num_splits
        first_part = counter.to(tl.int64)
        slot = first_part + split
        part_M = tl.arange(0, BLOCK_M)
        tl.store(sums + slot * 2 * BLOCK_M + part_M, max_M)
        tl.store(sums + slot * 2 * BLOCK_M + BLOCK_M + part_M, sum_M)
        at_MD = (slot * BLOCK_M + part_M)[:, None] * BLOCK_D + offsets_D[None, :]
        tl.store(partials + at_MD, acc_MD, mask=alive_M[:, None])
        # Every thread's stores are done before one thread releases them; the program that counts last acquires all.
        tl.debug_barrier()
        if tl.atomic_add(counters + counter, 1, sem="acq_rel", scope="gpu") == num_used - 1:
            tl.debug_barrier()
            if SPLIT_BLOCKS > 0:
                _merge_splits(
                    out, out_M, alive_M, partials, sums, first_part, num_used, first_max_M, first_sum_M,
                    DIM, BLOCK_M, BLOCK_D, JOIN_D,
                )  # fmt: skip
            else:
                _join_splits(
                    out, out_M, alive_M, partials, sums, first_part, num_used,
                    DIM, BLOCK_M, BLOCK_D, JOIN_D, MAX_SPLITS,
                )  # fmt: skip
            tl.store(counters + counter, 0)
    else:
        mean_MD = (acc_MD / sum_M[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_M[:, None] + offsets_D[None, :], mean_MD, mask=inside_MD)
