"""Which variants of the kernels steps take: all of them have been compiled before the replica starts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.attention import parts
from engine.attention.interface import AttentionTables
from engine.attention.parts import PartCutter
from engine.attention.tiles import default_tiles
from engine.build_runner import StepLimits, steps_beyond_graphs
from engine.runner.graphs import ladder
from engine.settings import ExecutionSettings

MOST_KEYS = 32768
LIMITS = StepLimits(rows=2048, items=64, sampled=512, steps=1)


class Cuts:
    """Stands in for the cut's kernel, and keeps the constants that each launch was compiled with."""

    def __init__(self) -> None:
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, _grid: tuple[int]) -> Callable[..., None]:
        return lambda *_, **constants: self.constants.append(constants)


def cut(rows: int, items: int, longest: int, group: int, most_keys: int = MOST_KEYS) -> None:
    tables = AttentionTables(
        query_starts_B1=torch.zeros(items + 1, dtype=torch.int32),
        kv_lens_B=torch.zeros(items, dtype=torch.int32),
        pages_PBM=(),
        slots_PN=(),
        max_query_len=longest,
        max_kv_len=most_keys,
    )
    tiles = default_tiles(128, torch.bfloat16, 90)
    PartCutter(tiles, 132, tables).cut(rows, 8, group, None, most_keys)


@pytest.mark.parametrize("group", [1, 4, 8, 20])
@pytest.mark.parametrize("graphs", [True, False])
def test_no_step_needs_a_kernel_that_was_not_rehearsed(
    monkeypatch: pytest.MonkeyPatch, group: int, graphs: bool
) -> None:
    """A prompt of two requests could compile for seconds, while all others waited: the cut had a variant for each power
    of two of items, and steps of unequal items were not rehearsed without graphs."""
    execution = ExecutionSettings(graphs=graphs)
    first = execution.max_graph_tokens + 1 if graphs else 1
    monkeypatch.setattr(parts, "cut_into_parts", rehearsed := Cuts())
    for rows, items, longest in steps_beyond_graphs(LIMITS, execution):
        cut(rows, items, longest, group)
    choose = random.Random(group)
    monkeypatch.setattr(parts, "cut_into_parts", needed := Cuts())
    for _ in range(3000):
        longest = choose.choice([1, 2, 8, 100, 1000])
        lengths = [choose.randint(1, longest) for _ in range(choose.randint(1, LIMITS.items))]
        if first <= sum(lengths) <= LIMITS.rows:
            cut(sum(lengths), len(lengths), max(lengths), group)
    assert len(needed.constants) > 200
    assert [each for each in needed.constants if each not in rehearsed.constants] == []


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("graphs", [True, False])
def test_tables_as_wide_as_their_longest_item_need_no_other_kernel(
    monkeypatch: pytest.MonkeyPatch, group: int, graphs: bool
) -> None:
    """Steps that score their input, drafts under penalties and a draft model's steps have such tables; rehearsals have
    the widest. Where nothing could be split, each tile had a variant of its own, which the first such step compiled."""
    execution = ExecutionSettings(graphs=graphs)
    monkeypatch.setattr(parts, "cut_into_parts", rehearsed := Cuts())
    for rows, items, longest in steps_beyond_graphs(LIMITS, execution):
        cut(rows, items, longest, group)
    for size in ladder(execution.max_graph_tokens) if graphs else ():
        cut(size, size, 1, group)
        cut(size, size, size, group)
    choose = random.Random(group)
    monkeypatch.setattr(parts, "cut_into_parts", needed := Cuts())
    for _ in range(2000):
        keys = choose.choice([1, 60, 128, 200, 256, 1000])
        lengths = [choose.randint(1, keys) for _ in range(choose.choice([1, 2, 7, LIMITS.items]))]
        if sum(lengths) <= LIMITS.rows:
            cut(sum(lengths), len(lengths), max(lengths), group, keys)
    assert len(needed.constants) > 200
    assert [each for each in needed.constants if each not in rehearsed.constants] == []


def test_items_of_more_rows_than_a_narrow_tile_need_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty heads of a group are more than the sixteen rows of a narrow tile, so no item could take it."""
    monkeypatch.setattr(parts, "cut_into_parts", cuts := Cuts())
    cut(700, 3, 600, group=20)
    assert len(cuts.constants) == 1
