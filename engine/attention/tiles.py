"""How attention is cut into programs: the constants, which a benchmark may vary."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.runner.kv_pool import FP8

EVERY_SPLIT = 512
"""Tokens of a split of deterministic attention. One stream over 2,048 tokens has four programs for each key head; over
32,768, the last of 64 merges the others' sums one after another."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """One variant of the kernel. A tile is `block_m` rows (queries times the heads that share a key head), which take
    `block_n` keys at a time; both are powers of two from 16. Tiles are split along their keys as long as there are at
    most `programs` programs per multiprocessor: as many as run at once, or several times as many."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """`shapes` ascend in block_m: a step takes the first that holds all rows of its longest item, else the last. Beside
    long items, those that the first shape holds take that one.

    A split has at least `min_split` tokens, and at least two for each row of its tile, because its result is written
    and read again in float32. There are at most `max_splits`, a power of two.

    With `every_split` each split has as many tokens instead, and a row's result does not depend on what else a step
    holds (engine/kernels/paged_attention.py). Then all shapes have the same `block_n`, of which it is a multiple.
    """

    shapes: tuple[TileShape, ...]
    min_split: int = 128
    max_splits: int = 32
    every_split: int | None = None

    def __post_init__(self) -> None:
        sizes = [shape.block_m for shape in self.shapes]
        powers = [*sizes, *(shape.block_n for shape in self.shapes)]
        if not sizes or sizes != sorted(sizes) or any(size < 16 or size & (size - 1) for size in powers):
            raise ValueError(f"tiles must be powers of two from 16 and ascend in block_m: {self.shapes}")
        if self.max_splits < 1 or self.max_splits & (self.max_splits - 1):
            raise ValueError(f"max_splits is a power of two, not {self.max_splits}")
        if self.every_split is not None:
            widths = {shape.block_n for shape in self.shapes}
            if len(widths) > 1 or self.every_split <= 0 or self.every_split % widths.pop():
                raise ValueError(f"splits of {self.every_split} tokens need one block_n: {self.shapes}")

    def shape(self, rows: int) -> TileShape:
        """The shape for steps whose longest item has `rows` rows."""
        return next((shape for shape in self.shapes if rows <= shape.block_m), self.shapes[-1])

    def least_split(self, shape: TileShape) -> int:
        return max(self.min_split, 2 * shape.block_m)

    def least_blocks(self, shape: TileShape) -> int:
        """The blocks of keys that hold `least_split` tokens."""
        return -(-self.least_split(shape) // shape.block_n)

    @property
    def split_blocks(self) -> int:
        """The blocks of keys of every split, 0 if splits are as long as the step needs."""
        return 0 if self.every_split is None else self.every_split // self.shapes[0].block_n


def _is_large(capability: int | None) -> bool:
    """Whether a block may have 227 KB of shared memory: 9.x to 11.x. 12.x (GeForce RTX 50, RTX PRO) has 99, as 8.6 and
    8.9, and multiplies as they do."""
    return capability is not None and 90 <= capability < 120


def default_tiles(head_dim: int, kv_dtype: torch.dtype, capability: int | None) -> AttentionTiles:
    """Tiles for a pool of `kv_dtype` on a GPU with this compute capability (None: the interpreter). Chosen so that no
    registers spill and shared memory suffices; benchmarks measure their speed."""
    if kv_dtype == torch.float32:  # no matrix units: every thread holds what it multiplies
        if head_dim > 128:
            return AttentionTiles((TileShape(16, 16, 8, 2, 4),))
        return AttentionTiles((TileShape(16, 32, 8, 2, 4), TileShape(32, 16, 8, 2, 2)))
    large = _is_large(capability)
    fp8 = kv_dtype == FP8
    if head_dim <= 64:
        narrow, middle = TileShape(16, 128, 4, 3, 12), TileShape(64, 64, 4, 3, 2)
        return AttentionTiles((narrow, middle, TileShape(128, 64, 8, 3, 1)))
    if head_dim <= 128:
        block_n = 64 if large else 32
        middle, wide = TileShape(64, block_n, 4, 3, 2), TileShape(128, block_n, 8, 2 if fp8 else 3, 1)
        narrow = TileShape(16, 128 if large and fp8 else 64, 4, 3, 12)
        return AttentionTiles((narrow, middle, wide))
    wide = TileShape(64, 64 if large and not fp8 else 32, 8, 2, 2)
    return AttentionTiles((TileShape(16, 32, 4, 3 if large else 2, 12), wide))


def deterministic_tiles(head_dim: int, kv_dtype: torch.dtype, capability: int | None) -> AttentionTiles:
    """Tiles that give a row the same bits whatever a step holds. They sum along a row in one order: where two shapes
    are given, both have a row's numbers in the same four threads, which is how Hopper's matrix units leave them. An
    item is cut into all of its splits or not at all, so `programs` is for more splits than run at once."""
    if kv_dtype == torch.float32:
        return AttentionTiles(
            (TileShape(16, 16 if head_dim > 128 else 32, 8, 2, 16),), every_split=EVERY_SPLIT
        )
    large = _is_large(capability)
    if head_dim > 128:
        return AttentionTiles((TileShape(64, 32, 8, 2, 8),), every_split=EVERY_SPLIT)
    narrow = TileShape(64, 64 if large or head_dim <= 64 else 32, 4, 3, 16)
    if not large:
        return AttentionTiles((narrow,), every_split=EVERY_SPLIT)
    wide = TileShape(128, 64, 8, 2 if kv_dtype == FP8 else 3, 8)
    return AttentionTiles((narrow, wide), every_split=EVERY_SPLIT)
