"""Tenants take turns, nobody waits while a place is free, and a caller that leaves keeps no place."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import EngineOverloaded
from serving.grammars.fair_queue import FairQueue


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_tenant_waits_for_one_of_another_and_not_for_all() -> None:
    """Distinct hard schemas of one tenant took 4 to 7 s each, and the schemas of all other tenants waited behind
    them."""
    queue, order = FairQueue("things", most=99, most_of_tenant=99), list[str]()

    async def work(name: str) -> None:
        async with queue.place(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2"):
            group.create_task(work(name))
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert queue.num_waiting == 0


async def test_so_many_wait_and_no_more() -> None:
    queue = FairQueue("things", most=3, most_of_tenant=2)
    done = asyncio.Event()

    async def work(tenant: str) -> None:
        async with queue.place(tenant):
            await done.wait()

    async with asyncio.TaskGroup() as group:
        for tenant in ("a", "a", "a"):
            group.create_task(work(tenant))
        await settle()
        with pytest.raises(EngineOverloaded, match="too many things wait"):
            await work("a")
        group.create_task(work("b"))
        await settle()
        with pytest.raises(EngineOverloaded):
            await work("c")
        done.set()
    assert queue.num_waiting == 0
    await work("c")


@given(st.lists(st.sampled_from("abc"), max_size=12), st.randoms(use_true_random=False))
def test_whoever_is_cancelled_leaves_the_place_to_others(tenants: list[str], rng: random.Random) -> None:
    async def play() -> None:
        queue, inside = FairQueue("things", most=99, most_of_tenant=99), 0

        async def work(tenant: str) -> None:
            nonlocal inside
            async with queue.place(tenant):
                inside += 1
                assert inside == 1
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(work(tenant)) for tenant in tenants]
        for task in rng.sample(tasks, len(tasks) // 2):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert queue.num_waiting == 0
        async with asyncio.timeout(20.0):
            await work("d")

    asyncio.run(play())
