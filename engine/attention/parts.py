"""How a step is cut into parts of attention, one for each program and key head. The device cuts; what is launched
depends on the step's shapes alone, so that a CUDA graph may hold it.

Legend: B items, Q parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.attention.interface import AttentionTables
from engine.attention.tiles import AttentionTiles, TileShape
from engine.kernels.attention_parts import cut_into_parts

ANY_ROWS = 2**31 - 1
CHUNK = 128
"""Entries that a program of the cut writes at once."""

LEAST_BLOCK_B = 512
"""The cut's kernel takes at least this many items, most of them none, so that few variants of it are compiled."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The parts of some of a step's items, all with tiles of one shape. At most `most` parts; engine/kernels/
    attention_parts.py says what the tensors hold."""

    shape: TileShape
    most: int
    max_splits: int
    tensors: tuple[Tensor, ...]
    """part_starts [B + 1], item_splits [B], slot_starts [B] and part_items [Q], as the kernels take them"""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Items of more than `least_rows` rows and of at most `most_rows`. They have at most `most_tiles` tiles."""

    shape: TileShape
    least_rows: int
    most_rows: int
    most_tiles: int


class PartCutter:
    """Cuts one step. Items of few rows and of many get tiles of their own size: a decode in a tile for prompts would
    multiply a hundred rows of nothing."""

    def __init__(self, tiles: AttentionTiles, multiprocessors: int, tables: AttentionTables) -> None:
        self._tiles = tiles
        self._multiprocessors = multiprocessors
        self._tables = tables

    def cut(
        self, rows: int, kv_heads: int, group: int, window: int | None, most_keys: int, *, few: bool = False
    ) -> Sequence[Parts]:
        """`rows`: tokens of the step. `group`: query heads of a key head. `most_keys`: of the longest item. `few`: only
        items of at most `few_rows` rows."""
        bounds = [self._few_bounds(group)] if few else self._bounds(rows, group)
        return [self._cut(each, kv_heads, group, window, most_keys) for each in bounds]

    def few_rows(self, group: int) -> int:
        """The most rows of a decode, and of items that are treated like one."""
        return max(self._tiles.shapes[0].block_m, group)

    def _few_bounds(self, group: int) -> _Bounds:
        rows, items = self.few_rows(group), len(self._tables.kv_lens_B)
        shape = self._tiles.shape(rows)
        return _Bounds(shape, 0, rows, items * -(-rows // shape.block_m))

    def _bounds(self, rows: int, group: int) -> Sequence[_Bounds]:
        items, longest = len(self._tables.kv_lens_B), self._tables.max_query_len
        narrow, shape = self._tiles.shapes[0], self._tiles.shape(longest * group)

        def most_tiles(count: int) -> int:
            return (rows * group + count * (shape.block_m - 1)) // shape.block_m

        if longest * group <= narrow.block_m:
            return [_Bounds(narrow, 0, ANY_ROWS, items)]
        if shape is narrow or group > narrow.block_m or rows == items * longest:
            return [_Bounds(shape, 0, ANY_ROWS, most_tiles(items))]
        many_rows = min(items, rows * group // (narrow.block_m + 1))
        return [
            _Bounds(narrow, 0, narrow.block_m, items),
            _Bounds(shape, narrow.block_m, ANY_ROWS, most_tiles(many_rows)),
        ]

    def _cut(self, bounds: _Bounds, kv_heads: int, group: int, window: int | None, most_keys: int) -> Parts:
        tables, tiles, shape = self._tables, self._tiles, bounds.shape
        items = len(tables.kv_lens_B)
        budget = self._multiprocessors * shape.programs // kv_heads
        # The kernels depend on the tiles alone, not on the step: another width of its tables is no other variant.
        max_splits = tiles.max_splits if budget >= 2 else 1
        splits = self._most_splits(shape, most_keys) if budget >= 2 else 1
        most = min(max(budget, bounds.most_tiles + budget // 2), bounds.most_tiles * splits)
        if tiles.split_blocks:
            most = min(bounds.most_tiles + budget, bounds.most_tiles * splits)
        numbers = torch.empty(3 * items + 1 + most, dtype=torch.int32, device=tables.kv_lens_B.device)
        parts = Parts(shape, most, max_splits, numbers.split_with_sizes((items + 1, items, items, most)))
        cut_into_parts[(items,)](
            *parts.tensors,
            tables.query_starts_B1,
            tables.kv_lens_B,
            items,
            budget,
            window or 0,
            GROUP=group,
            LEAST_ROWS=bounds.least_rows,
            MOST_ROWS=bounds.most_rows,
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            MIN_BLOCKS=tiles.least_blocks(shape),
            MAX_SPLITS=max_splits,
            SPLIT_BLOCKS=0 if splits == 1 else tiles.split_blocks,
            HAS_WINDOW=window is not None,
            BLOCK_B=max(LEAST_BLOCK_B, triton.next_power_of_2(items)),
            CHUNK=CHUNK,
        )
        return parts

    def _most_splits(self, shape: TileShape, most_keys: int) -> int:
        """Of one tile over `most_keys` keys, which may be more than it sees."""
        if self._tiles.every_split is not None:
            return max(2, -(-most_keys // self._tiles.every_split))  # one kernel for short and long steps
        return min(self._tiles.max_splits, -(-most_keys // self._tiles.least_split(shape)))
