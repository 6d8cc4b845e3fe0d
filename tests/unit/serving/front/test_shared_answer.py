"""However many callers ask at a time, only one question is on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from serving.background import BackgroundTasks
from serving.front.shared_answer import SharedAnswer


class Oracle:
    """Counts the questions. Once `let` is set it answers with the count."""

    def __init__(self) -> None:
        self.asked = 0
        self.let = asyncio.Event()
        self.fails = False

    async def ask(self) -> int:
        self.asked += 1
        await self.let.wait()
        if self.fails:
            raise ValueError("no")
        return self.asked


@pytest.fixture
async def tasks() -> AsyncIterator[BackgroundTasks]:
    tasks = BackgroundTasks()
    yield tasks
    await tasks.stop(1.0)


async def test_many_ask_at_once(tasks: BackgroundTasks) -> None:
    """Each scrape without a key used to ask every process of the cluster."""
    oracle = Oracle()
    shared = SharedAnswer(oracle.ask, tasks)
    asking = [asyncio.create_task(shared.get()) for _ in range(100)]
    await asyncio.sleep(0)
    oracle.let.set()
    assert set(await asyncio.gather(*asking)) == {1}
    assert await shared.get() == 2, "it is not kept"


async def test_who_leaves_takes_the_answer_from_nobody(tasks: BackgroundTasks) -> None:
    oracle = Oracle()
    shared = SharedAnswer(oracle.ask, tasks)
    first, second = asyncio.create_task(shared.get()), asyncio.create_task(shared.get())
    await asyncio.sleep(0)
    first.cancel()
    oracle.let.set()
    assert await second == 1


async def test_an_error_is_told_to_all_and_not_kept(tasks: BackgroundTasks) -> None:
    oracle = Oracle()
    shared = SharedAnswer(oracle.ask, tasks)
    oracle.fails = True
    oracle.let.set()
    for answer in await asyncio.gather(shared.get(), shared.get(), return_exceptions=True):
        assert isinstance(answer, ValueError)
    oracle.fails = False
    assert await shared.get() == 2
