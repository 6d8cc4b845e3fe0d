"""Picks a token for each row of logits on the device, without a sort and without going to the host.

Legend: R rows, V vocabulary, T tiles of TILE tokens, G the tiles that are held in registers.

A row's tokens are ordered by their gap, the largest logit less their own, in float32. Gaps are not negative, so their
bits are integers in the same order. Where the k most likely tokens end, and where the nucleus ends, is found by
bisection over these keys, in at most 31 halvings, never by comparing tokens with each other.

There are two kernels. `survey_tiles` reads the logits once, in many programs per row, and writes each tile's largest
logit and mass. `pick_row`, one program per row, starts from that summary alone, 1/32 of the bytes. Greedy rows and rows
with only a temperature need one tile more. Rows with filters take the G tiles with the largest peaks into registers:
every token as likely as the least of these peaks is among them, at least G tokens. If the filters end there, as they
mostly do, nothing else is read. Else (a wide nucleus, or k > G) the row is read again, from the L2 cache, for every
pass of a search with three pivots.

Bytes: R * V of logits once, and little more. 64 rows of 128 k float32 logits are 33 MB, 10 us at 3.3 TB/s. A single row
is 0.5 MB, which 32 programs read in about the time of a launch. One multiprocessor alone, at some 60 GB/s, takes 8 us,
and so does each pass of the wide search.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.key_search import (
    HIGHEST,
    HIGHEST_KEY,
    crossing,
    finite,
    gap_below,
    key_of,
    least_key,
    least_key_of_row,
    mass_of,
)
from engine.runner.sample_table import SampleTable
from engine.runner.sampler import LEAST_TEMPERATURE

TILE = 64
GROUP = 128
SURVEY_TILES = 64
PICK_WARPS = 8
BLOCK_TILES = 64

LOG2_E = tl.constexpr(1.4426950408889634)
SLACK = tl.constexpr(5e-7)
"""Part of the mass. The edge of a nucleus that is too wide for the registers is found no more finely than this, which
float32 can hardly resolve."""


def pick_tokens(logits_RV: Tensor, table: SampleTable, out_R: Tensor) -> None:
    """A RowPicker. Logits are float32, bfloat16 or float16; rows may be strided. Points may be float32 or float64.

    Picks the same tokens as engine/runner/sampler.py (temperature, top-k, top-p, min-p, then the inverse of the
    cumulative distribution at the row's point, by token id), with masses summed in float32. NaN counts as -inf. Raises
    ValueError for logits whose rows are not dense.
    """
    rows, vocab_size = logits_RV.shape
    if logits_RV.stride(1) != 1 or vocab_size < 1:
        raise ValueError(
            f"rows of logits must be dense: shape {rows, vocab_size}, strides {logits_RV.stride()}"
        )
    if rows == 0:
        return
    num_tiles = triton.cdiv(vocab_size, TILE)
    summary_2RT = torch.empty((2, rows, num_tiles), dtype=torch.float32, device=logits_RV.device)
    tiles_RG = torch.empty((rows, GROUP), dtype=torch.int32, device=logits_RV.device)
    survey_tiles[(triton.cdiv(num_tiles, SURVEY_TILES), rows)](
        logits_RV,
        summary_2RT[0],
        summary_2RT[1],
        table.temperature_R,
        logits_RV.stride(0),
        vocab_size,
        num_tiles,
        LEAST=LEAST_TEMPERATURE,
        TILES=SURVEY_TILES,
        TILE=TILE,
        num_warps=4,
    )
    pick_row[(rows,)](
        logits_RV,
        summary_2RT[0],
        summary_2RT[1],
        tiles_RG,
        table.temperature_R,
        table.top_k_R,
        table.top_p_R,
        table.min_p_R,
        table.point_R,
        out_R,
        logits_RV.stride(0),
        vocab_size,
        num_tiles,
        LEAST=LEAST_TEMPERATURE,
        TILES=max(2 * GROUP, triton.next_power_of_2(num_tiles)),
        GROUP=GROUP,
        TILE=TILE,
        BLOCK_TILES=BLOCK_TILES,
        num_warps=PICK_WARPS,
    )


@triton.jit
def _write_masses(
    row_V,
    vocab_size,
    masses_T,
    num_tiles,
    peak,
    cold,
    limit,
    least_mass,
    BLOCK_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes for each tile the mass of its tokens that are up to key `limit` and have at least `least_mass`."""
    tl.debug_barrier()  # all threads have finished reading masses_T
    for start in tl.range(0, num_tiles, BLOCK_TILES, num_stages=3):
        tiles = start + tl.arange(0, BLOCK_TILES)
        tokens = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        gap = gap_below(peak, finite(tl.load(row_V + tokens, tokens < vocab_size, float("-inf"))))
        mass = mass_of(gap, cold)
        kept = tl.where((key_of(gap) <= limit) & (mass >= least_mass), mass, 0.0)
        tl.store(masses_T + tiles, tl.sum(kept, 1), tiles < num_tiles)
    tl.debug_barrier()


@triton.jit
def survey_tiles(
    logits_RV,
    peaks_RT,
    masses_RT,
    temperature_R,
    row_stride,
    vocab_size,
    num_tiles,
    LEAST: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes for each tile the largest logit, and the mass relative to it; no mass for greedy rows."""
    row = tl.program_id(1)
    tiles = tl.program_id(0) * TILES + tl.arange(0, TILES)
    tokens = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    row_V = logits_RV + row.to(tl.int64) * row_stride
    logits = finite(tl.load(row_V + tokens, tokens < vocab_size, float("-inf")))
    peaks = tl.max(logits, 1)
    tl.store(peaks_RT + row * num_tiles + tiles, peaks, tiles < num_tiles)
    temperature = tl.load(temperature_R + row)
    if temperature > 0.0:
        cold = LOG2_E / tl.maximum(temperature, LEAST)
        masses = tl.sum(mass_of(gap_below(peaks[:, None], logits), cold), 1)
        tl.store(masses_RT + row * num_tiles + tiles, masses, tiles < num_tiles)


# The columns of a table lie one after another, so their alignment depends on the number of rows. A variant for each
# alignment would gain nothing, since a program reads one number of each column.
@triton.jit(do_not_specialize_on_alignment=["temperature_R", "top_k_R", "top_p_R", "min_p_R", "point_R"])
def pick_row(
    logits_RV,
    peaks_RT,
    masses_RT,
    tiles_RG,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    point_R,
    out_R,
    row_stride,
    vocab_size,
    num_tiles,
    LEAST: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    """One row's token, from the summary of its tiles. Overwrites the row of `masses_RT`."""
    row = tl.program_id(0)
    row_V = logits_RV + row.to(tl.int64) * row_stride
    masses_T = masses_RT + row * num_tiles
    temperature = tl.load(temperature_R + row)
    all_tiles = tl.arange(0, TILES)
    in_tile = tl.arange(0, TILE)
    peaks = tl.load(peaks_RT + row * num_tiles + all_tiles, all_tiles < num_tiles, float("-inf"))
    peak = tl.max(peaks, 0)
    gaps = gap_below(peak, peaks)
    nearest = tl.min(gaps, 0)
    best_tile = tl.min(tl.where(gaps == nearest, all_tiles, TILES), 0)

    tile = best_tile
    cold = 0.0
    limit = HIGHEST_KEY
    least_mass = 0.0
    target = 0.0
    before = 0.0
    drawn = temperature > 0.0
    if drawn:
        cold = LOG2_E / tl.maximum(temperature, LEAST)
        point = tl.load(point_R + row)
        top_k = tl.load(top_k_R + row)
        top_p = tl.load(top_p_R + row)
        least_mass = tl.load(min_p_R + row)
        has_k = (top_k > 0) & (top_k < vocab_size)
        has_p = top_p < 1.0
        masses = tl.load(masses_T + all_tiles, all_tiles < num_tiles, 0.0) * mass_of(gaps, cold)
        settled = False
        if has_k | has_p | (least_mass > 0.0):
            # Every token up to key `reach` lies in one of at most GROUP tiles.
            keys_T = key_of(gaps)
            reach = HIGHEST_KEY + tl.zeros_like(best_tile)
            none = reach * 0 - 1
            if num_tiles > GROUP:
                reach = least_key(keys_T, tl.full([TILES], 1.0, tl.float32), GROUP + 1.0, none, reach) - 1
            near = (keys_T <= reach) & (all_tiles < num_tiles)
            places = tl.cumsum(near.to(tl.int32), 0) - 1
            tl.store(tiles_RG + row * GROUP + places, all_tiles, near)
            tl.debug_barrier()
            members = tl.arange(0, GROUP)
            held = members < tl.sum(near.to(tl.int32), 0)
            tiles_G = tl.load(tiles_RG + row * GROUP + members, held, 0)
            tokens = tiles_G[:, None] * TILE + in_tile[None, :]
            inside = held[:, None] & (tokens < vocab_size)
            gaps_GT = gap_below(peak, finite(tl.load(row_V + tokens, inside, float("-inf"))))
            keys_GT = key_of(gaps_GT)
            masses_GT = mass_of(gaps_GT, cold)

            total = tl.sum(masses, 0)
            # Not vocab_size.to: a launch turns a size of 1 into a constant, which has no methods.
            vocab = total * 0.0 + vocab_size
            bound = reach
            total_known = True
            within = tl.sum(tl.where(keys_GT <= reach, masses_GT, 0.0))
            if has_k:
                ones_GT = mass_of(gaps_GT, 0.0)
                within = tl.sum(tl.where(keys_GT <= reach, ones_GT, 0.0))
                total_known = within >= top_k
                if total_known:
                    bound = least_key(keys_GT, ones_GT, top_k.to(tl.float32), none, reach)
                    total = tl.sum(tl.where(keys_GT <= bound, masses_GT, 0.0))
                    settled = True
            if has_p & total_known:  # noqa: SIM102 (Triton's `and` would compute both)
                if tl.sum(tl.where(keys_GT <= bound, masses_GT, 0.0)) >= top_p * total:
                    bound = least_key(keys_GT, masses_GT, top_p * total, none, bound)
                    settled = True
            # No token out of reach has more mass than this. `reach` is -1 if too many tokens are equal.
            beyond = mass_of(tl.maximum(reach, 0).to(tl.float32, bitcast=True), cold)
            settled = settled | ((beyond < least_mass) & (total_known | (top_p >= 1.0)))
            limit = bound
            if settled:
                kept_GT = tl.where((keys_GT <= limit) & (masses_GT >= least_mass), masses_GT, 0.0)
                place, target, before = crossing(tl.sum(kept_GT, 1), point, GROUP)
                drawn = place < GROUP
                tile = tl.sum(tl.where(members == place, tiles_G, 0), 0)
            else:
                BLOCK: tl.constexpr = BLOCK_TILES * TILE
                limit = HIGHEST_KEY + tl.zeros_like(best_tile)
                if has_k:
                    wanted = top_k.to(tl.float32)
                    limit = least_key_of_row(
                        row_V, vocab_size, peak, 0.0, wanted, 0.0, reach, limit, within, vocab, BLOCK
                    )
                    if has_p:
                        _write_masses(
                            row_V, vocab_size, masses_T, num_tiles, peak, cold, limit, 0.0, BLOCK_TILES, TILE
                        )
                        total = tl.sum(tl.load(masses_T + all_tiles, all_tiles < num_tiles, 0.0), 0)
                if has_p:
                    # Tokens past this gap together have less than 1 - top_p, even if they were the whole vocabulary.
                    widest = tl.log2(vocab / ((1.0 - top_p) * total)) * 1.001 / cold
                    far = tl.minimum(limit, key_of(tl.minimum(tl.maximum(widest, 0.0), HIGHEST)))
                    low = tl.where(has_k, none, reach)
                    upto_low = tl.where(has_k, 0.0, within)
                    wanted = top_p * total
                    limit = least_key_of_row(
                        row_V, vocab_size, peak, cold, wanted, total * SLACK, low, far, upto_low, total, BLOCK
                    )
                _write_masses(
                    row_V, vocab_size, masses_T, num_tiles, peak, cold, limit, least_mass, BLOCK_TILES, TILE
                )
                masses = tl.load(masses_T + all_tiles, all_tiles < num_tiles, 0.0)
        if not settled:
            place, target, before = crossing(masses, point, TILES)
            drawn = place < TILES
            tile = place
    tile = tl.where(drawn, tile, best_tile)

    tokens = tile * TILE + in_tile
    gaps_I = gap_below(peak, finite(tl.load(row_V + tokens, tokens < vocab_size, float("-inf"))))
    picked = tl.min(tl.where(gaps_I == nearest, in_tile, TILE), 0)
    if drawn:
        masses_I = mass_of(gaps_I, cold)
        masses_I = tl.where((key_of(gaps_I) <= limit) & (masses_I >= least_mass), masses_I, 0.0)
        upto = before + tl.cumsum(masses_I, 0)
        last = tl.max(tl.where(masses_I > 0.0, in_tile, 0), 0)
        crossed = tl.min(tl.where((upto > target) & (masses_I > 0.0), in_tile, TILE), 0)
        picked = tl.minimum(crossed, last)
    tl.store(out_R + row, (tile * TILE + picked).to(tl.int64))
