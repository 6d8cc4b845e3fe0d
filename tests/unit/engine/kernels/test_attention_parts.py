"""How steps are cut into parts, and the bounds that launches and workspaces rely on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import triton

from engine.kernels.attention_parts import cut_into_parts
from tests.unit.engine.attention.stage import DEVICE

ANY_ROWS = 2**31 - 1
Item = tuple[int, int]
"""New tokens, and all tokens."""


@dataclass(frozen=True)
class Cut:
    """What one launch wrote."""

    starts: list[int]
    splits: list[int]
    slots: list[int]
    items: list[int]


@dataclass(frozen=True)
class Cutting:
    group: int = 1
    least_rows: int = 0
    most_rows: int = ANY_ROWS
    block_m: int = 16
    block_n: int = 64
    min_blocks: int = 2
    max_splits: int = 32
    window: int | None = None
    split_blocks: int = 0

    def tiles(self, new: int) -> int:
        mine = self.least_rows < new * self.group <= self.most_rows
        return -(-new * self.group // self.block_m) if mine else 0

    def cut(self, items: Sequence[Item], budget: int, room: int) -> Cut:
        """`room`: for how many parts there is memory."""
        count = len(items)
        starts_B1 = torch.tensor(
            [0, *torch.tensor([new for new, _ in items]).cumsum(0).tolist()], dtype=torch.int32
        )
        lens_B = torch.tensor([total for _, total in items], dtype=torch.int32)
        written = [
            torch.full((size,), -7, dtype=torch.int32, device=DEVICE)
            for size in (count + 1, count, count, room)
        ]
        cut_into_parts[(count,)](
            *written, starts_B1.to(DEVICE), lens_B.to(DEVICE), count, budget, self.window or 0,
            GROUP=self.group, LEAST_ROWS=self.least_rows, MOST_ROWS=self.most_rows, BLOCK_M=self.block_m,
            BLOCK_N=self.block_n, MIN_BLOCKS=self.min_blocks, MAX_SPLITS=self.max_splits,
            SPLIT_BLOCKS=self.split_blocks,
            HAS_WINDOW=self.window is not None, BLOCK_B=triton.next_power_of_2(count), CHUNK=16,
        )  # fmt: skip
        starts, splits, slots, of_parts = (tensor.tolist() for tensor in written)
        assert of_parts[starts[-1] :] == [-7] * (room - starts[-1]), "it wrote past the parts"
        return Cut(starts, splits, slots, of_parts[: starts[-1]])


def check(cutting: Cutting, items: Sequence[Item], budget: int) -> Cut:
    """Each tile has its parts in order, and the bounds of the kernel's docstring hold."""
    tiles = [cutting.tiles(new) for new, _ in items]
    bound = sum(tiles) + budget if cutting.split_blocks else max(budget, sum(tiles) + budget // 2)
    if cutting.split_blocks:  # of a step whose page table is as wide as its longest item
        most_keys = max(total for _, total in items)
        bound = min(bound, sum(tiles) * max(2, -(-most_keys // (cutting.split_blocks * cutting.block_n))))
    cut = cutting.cut(items, budget, bound + 5)
    counts = [tile * split for tile, split in zip(tiles, cut.splits, strict=True)]
    assert cut.items == [item for item, count in enumerate(counts) for _ in range(count)]
    assert cut.starts == [sum(counts[:item]) for item in range(len(items) + 1)]
    assert max(cut.splits) <= cutting.max_splits
    assert cut.starts[-1] <= bound
    slots = [count if split > 1 else 0 for count, split in zip(counts, cut.splits, strict=True)]
    assert cut.slots == [sum(slots[:item]) for item in range(len(items))]
    assert sum(slots) <= budget
    return cut


def test_a_long_history_among_short_ones_is_cut_finely() -> None:
    """All items had as many splits: 63 sessions of 512 tokens and one of 32,768 gave three to each."""
    cut = check(Cutting(group=8), [(1, 512)] * 63 + [(1, 32768)], budget=198)
    assert cut.splits == [1] * 63 + [32]


def test_items_alike_share_the_card() -> None:
    cut = check(Cutting(group=8), [(1, 8192)] * 64, budget=198)
    assert cut.splits == [3] * 64


@pytest.mark.parametrize(("new", "splits"), [(16, 16), (64, 4), (128, 2)])
def test_a_turn_on_a_long_history_fills_the_card(new: int, splits: int) -> None:
    """A place used to be kept for each tile, so that 128 new tokens were not cut and used half of the card."""
    cut = check(Cutting(group=8, block_m=128, min_blocks=4), [(new, 32768)], budget=16)
    assert cut.splits == [splits]


def test_short_items_are_not_cut_however_much_room_there_is() -> None:
    assert check(Cutting(), [(1, 128), (1, 1), (1, 129)], budget=1000).splits == [1, 1, 2]


@pytest.mark.parametrize(
    ("budget", "splits"),
    [
        (1000, [64, 3, 1, 64]),
        (130, [64, 1, 1, 64]),
        (127, [64, 3, 1, 1]),
        (63, [1, 3, 1, 1]),
        (2, [1, 1, 1, 1]),
    ],
)
def test_splits_of_one_length_are_all_there_or_none(budget: int, splits: list[int]) -> None:
    """The longest first, as many as there are slots for."""
    items = [(1, 32768), (1, 1300), (1, 512), (1, 32768)]
    assert check(Cutting(split_blocks=8, max_splits=1000), items, budget).splits == splits


def test_a_window_may_begin_within_a_split() -> None:
    """Blocks 8 to 10 of 64 keys lie in one split, blocks 7 to 9 in two. A whole history is cut no further than it
    reaches: parts past it had no room."""
    assert check(Cutting(split_blocks=8, window=129), [(1, 704), (1, 640)], 64).splits == [2, 2]
    assert check(Cutting(split_blocks=8, window=4096, block_m=64), [(256, 1024), (1, 1024)], 64).splits == [
        2,
        2,
    ]


@pytest.mark.parametrize("budget", [2, 3, 64])
def test_more_tiles_than_the_card_has_room_for(budget: int) -> None:
    """A history that is much longer than the others is cut all the same."""
    cut = check(Cutting(block_m=32), [(700, 700)] * 5 + [(1, 60_000)], budget)
    assert cut.splits[:5] == [1] * 5
    assert cut.splits[5] > 1 or budget < 64


def test_items_of_few_rows_and_of_many_are_cut_apart() -> None:
    items = [(1, 900), (5, 30), (40, 900), (1, 5), (4, 4)]
    few = check(Cutting(group=4, most_rows=16), items, 64)
    many = check(Cutting(group=4, least_rows=16, block_m=64), items, 64)
    assert set(few.items) == {0, 3, 4}
    assert set(many.items) == {1, 2}


def test_padding_has_no_part() -> None:
    """Items without queries, and items without keys."""
    cut = check(Cutting(), [(1, 500), (0, 0), (0, 0)], 64)
    assert set(cut.items) == {0}
    assert Cutting().cut([(1, 500), (1, 0)], 64, 64).starts[1:] == [4, 4]


def test_keys_before_a_window_do_not_count() -> None:
    assert check(Cutting(window=256), [(1, 32768)], 64).splits == [2]


@pytest.mark.parametrize("seed", range(12 if DEVICE.type == "cpu" else 20))
def test_any_step(seed: int) -> None:
    """The test's parameter is the seed."""
    choose = random.Random(seed)
    longest = choose.choice([1, 1, 8, 300])
    totals = [int(math.exp(choose.uniform(0, 10))) for _ in range(choose.choice([1, 3, 17, 40]))]
    items = [(choose.randint(1, min(total, longest)), total) for total in totals]
    cutting = Cutting(
        group=choose.choice([1, 3, 8]),
        block_m=choose.choice([16, 64]),
        block_n=choose.choice([16, 64]),
        min_blocks=choose.choice([1, 2, 8]),
        max_splits=choose.choice([4, 32]),
        window=choose.choice([None, None, choose.randint(1, 4000)]),
    )
    budget = choose.choice([2, 5, 33, 198, 1584])
    check(cutting, items, budget)
    fixed = replace(cutting, split_blocks=choose.choice([1, 4, 8]), max_splits=1_000_000)
    check(fixed, items, budget)
