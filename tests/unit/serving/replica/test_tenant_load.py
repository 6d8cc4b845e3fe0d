"""The limits of a tenant at a replica concern that tenant alone. What has ended no longer counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import EngineOverloaded
from serving.replica.tenant_load import TenantLoad
from serving.wire.turns import TurnEvent
from tests.unit.serving.replica_rig import Rig, call, running_rig


def refused(load: TenantLoad, tenant: str, num_tokens: int) -> bool:
    try:
        load.begin("tried", tenant, num_tokens)
    except EngineOverloaded:
        return True
    load.end("tried")
    return False


def test_turns_are_limited_tenant_by_tenant() -> None:
    load = TenantLoad(max_turns=2)
    load.begin("1", "a", 5)
    load.begin("2", "a", 5)
    assert (refused(load, "a", 1), refused(load, "b", 1)) == (True, False)
    load.end("1")
    assert not refused(load, "a", 1)


def test_queued_tokens_are_limited_until_they_are_computed() -> None:
    load = TenantLoad(max_queued_tokens=10)
    load.begin("1", "a", 99)
    assert (refused(load, "a", 1), refused(load, "b", 10)) == (True, False)
    load.computed("1")
    load.computed("1")
    load.begin("2", "a", 6)
    assert (refused(load, "a", 4), refused(load, "a", 5)) == (False, True)
    load.end("2")
    assert not refused(load, "a", 99)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.booleans()), max_size=20))
def test_what_has_ended_leaves_nothing(requests: list[tuple[str, int, bool]]) -> None:
    load = TenantLoad(max_turns=3, max_queued_tokens=12)
    begun = []
    for number, (tenant, num_tokens, computed) in enumerate(requests):
        try:
            load.begin(str(number), tenant, num_tokens)
        except EngineOverloaded:
            continue
        begun.append(str(number))
        if computed:
            load.computed(str(number))
    for request_id in begun:
        load.end(request_id)
    assert not load._uses


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    tenants = {"max_turns_in_flight": 1, "max_queued_tokens": 100}
    async with running_rig(tmp_path, settings={"tenants": tenants}) as rig:
        yield rig
        await rig.books_are_empty()
        assert not rig.turns._load._uses


async def test_a_tenant_with_all_its_turns_in_flight_gets_429_and_others_go_on(rig: Rig) -> None:
    """One tenant could fill every replica's queue, and all others waited behind it."""
    rig.runner.hold()
    first = asyncio.create_task(rig.run(call([5], request_id="1", tenant="a")))
    await rig.begun()
    (event,) = await rig.run(call([5], request_id="2", tenant="a"))
    assert event.error is not None
    assert (event.error.status, event.error.code) == (429, "overloaded")
    assert event.error.retry_after_s is not None
    other = asyncio.create_task(rig.run(call([5], request_id="3", tenant="b")))
    rig.runner.go_on()
    assert _finished(await first)
    assert _finished(await other)
    assert _finished(await rig.run(call([5], request_id="4", tenant="a")))


def _finished(events: list[TurnEvent]) -> bool:
    return events[-1].finish is not None
