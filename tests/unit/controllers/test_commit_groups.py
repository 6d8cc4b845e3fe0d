"""Turns that wait for the log together: which turns form a group, and what each caller is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from store_turns import turn_of

from controllers.commit_groups import MOST_AT_ONCE, CommitGroups, Outcome
from controllers.errors import StaleEpoch, StoreError
from controllers.records import TurnRecord


class Writer:
    """Notes the indexes of each group's turns. While it is held no group gets its answer."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.began = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def hold(self) -> None:
        self.goes_on.clear()

    async def write(self, records: Sequence[TurnRecord]) -> Sequence[Outcome]:
        self.groups.append([record.turn_index for record in records])
        self.began.set()
        await self.goes_on.wait()
        if records[0].turn_index < 0:
            raise StoreError("away")
        return [
            StaleEpoch(f"{record.turn_index}") if record.turn_index % 10 == 9 else None for record in records
        ]


def commit(groups: CommitGroups, *indices: int) -> asyncio.Task[Sequence[Outcome]]:
    return asyncio.create_task(groups.commit([turn_of(index, 0, [1]) for index in indices]))


async def test_what_comes_at_the_same_time_is_written_at_once() -> None:
    writer = Writer()
    groups = CommitGroups(writer.write)
    await asyncio.gather(*(commit(groups, index) for index in range(8)))
    assert writer.groups == [list(range(8))]


async def test_what_comes_while_a_group_is_written_goes_with_the_next() -> None:
    writer = Writer()
    groups = CommitGroups(writer.write)
    writer.hold()
    first = commit(groups, 1)
    await writer.began.wait()
    later = [commit(groups, index) for index in (2, 3, 4)]
    await asyncio.sleep(0)
    assert writer.groups == [[1]]
    writer.goes_on.set()
    await asyncio.gather(first, *later)
    assert writer.groups == [[1], [2, 3, 4]]


async def test_each_is_told_its_own_outcome() -> None:
    groups = CommitGroups(Writer().write)
    told = await asyncio.gather(
        commit(groups, 1), commit(groups, 9), commit(groups, 2, 19, 3), commit(groups)
    )
    assert [[None if each is None else each.message for each in outcomes] for outcomes in told] == [
        [None],
        ["9"],
        [None, "19", None],
        [],
    ]


async def test_an_error_of_the_whole_group_is_told_to_all_of_it_and_to_nobody_else() -> None:
    groups = CommitGroups(Writer().write)
    failed = [commit(groups, -1), commit(groups, 1)]
    for task in failed:
        with pytest.raises(StoreError):
            await task
    assert await commit(groups, 2) == [None]


async def test_who_leaves_takes_back_neither_its_turn_nor_those_of_others() -> None:
    writer = Writer()
    groups = CommitGroups(writer.write)
    writer.hold()
    tasks = [commit(groups, 1)]
    await writer.began.wait()
    tasks += [commit(groups, 2), commit(groups, 3)]
    await asyncio.sleep(0)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.sleep(0)
    writer.goes_on.set()
    assert await tasks[2] == [None]
    assert writer.groups == [[1], [2, 3]]


async def test_a_group_has_an_end() -> None:
    writer = Writer()
    groups = CommitGroups(writer.write)
    half = MOST_AT_ONCE // 2
    await asyncio.gather(*(commit(groups, *range(half)) for _ in range(5)))
    assert [len(group) for group in writer.groups] == [2 * half, 2 * half, half]
    await commit(groups, *range(2 * MOST_AT_ONCE))
    assert len(writer.groups[-1]) == 2 * MOST_AT_ONCE, "what came together stays together"


async def test_a_group_without_an_answer_holds_up_the_next_only_for_so_long() -> None:
    writer = Writer()
    groups = CommitGroups(writer.write, patience_s=0.01)
    writer.hold()
    tasks = [commit(groups, 1)]
    await writer.began.wait()
    writer.began.clear()
    tasks.append(commit(groups, 2))
    await asyncio.wait_for(writer.began.wait(), 10.0)
    assert writer.groups == [[1], [2]]
    writer.goes_on.set()
    assert await asyncio.gather(*tasks) == [[None], [None]]
