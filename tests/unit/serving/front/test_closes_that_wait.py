"""A close that waits for a turn is carried out even if the turn's replica dies or the log is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from controllers.errors import StoreError
from controllers.retention import CLOSING_TIMEOUT_S
from serving.front import session_owners
from serving.wire.turns import ServiceError, TurnEvent
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.front.test_closes_through_front_ends import OtherIngress
from tests.unit.serving.replica_rig import WAIT_S, call

FIRST = [1, 2, 3]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Failover]:
    """Session "s" is at "a", with a turn in its history."""
    async with running_failover(tmp_path) as failover:
        failover.open_session("s")
        await failover.turn(call(FIRST, "s"))
        yield failover
        for rig in failover.rigs:
            await rig.settled()


async def close(served: Failover) -> bool:
    """Closes the session through an ingress."""
    return await OtherIngress(served).client.close_session("s", tenant="")


async def ended(served: Failover) -> None:
    async with asyncio.timeout(WAIT_S):
        while served.cluster.sessions():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("told", [True, False])
async def test_the_turn_goes_on_at_another_replica_and_the_session_ends_with_it(
    served: Failover, told: bool
) -> None:
    """The close used to be forgotten, and the session lived until its idle timeout. Found by the simulation, seed
    372."""
    a, b = served.rigs

    def is_closed_and_dies(number: int, _event: TurnEvent) -> bool:
        if number != told:
            return False
        turn_key = a.sessions.close("s")
        assert turn_key
        served.cluster.close_after("s", 1, turn_key)
        return True

    a.runner.hold()  # each event that the test reads lets one step run
    served.replicas.seems_lost = True
    served.replicas.losses["a"] = is_closed_and_dies
    async with aclosing(served.events(call([4], "s", max_new_tokens=20))) as events:
        *_, last = [event async for event in events]
    assert last.finish is not None
    assert last.completion_tokens == 20
    await ended(served)
    assert b.sessions.snapshot() == []
    a.runner.go_on()
    await asyncio.gather(*served.replicas.unheard)
    await b.books_are_empty()


async def test_no_other_turn_is_taken_by_the_next_owner(served: Failover) -> None:
    a = served.rigs[0]
    a.runner.hold()
    turn = asyncio.create_task(a.run(call([4], "s", key="k"), 1))
    await a.begun()
    assert await close(served)
    served.replicas.dead.add("a")
    served.cluster.report_unreachable("a", True)
    with pytest.raises(ServiceError) as caught:
        await served.turn(call([5], "s", key="other"))
    assert caught.value.info.code == "session_closing"
    assert (await served.turn(call([4], "s", key="k"))).finish is not None
    await ended(served)
    a.runner.go_on()
    await turn


async def test_a_next_owner_that_is_never_asked_for_the_turn_ends_the_session(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = served.rigs
    a.runner.hold()
    turn = asyncio.create_task(a.run(call([4], "s", key="k"), 1))
    await a.begun()
    assert await close(served)
    served.cluster.report_unreachable("a", True)
    epoch = served.cluster.resolve("s", False, "").epoch
    await b.host.hold("s", epoch)
    await b.host.expire_idle()
    assert b.sessions.knows("s", epoch)
    clock = b.sessions._clock
    monkeypatch.setattr(b.sessions, "_clock", lambda: clock() + CLOSING_TIMEOUT_S + 1)
    await b.host.expire_idle()
    assert served.cluster.sessions() == []
    a.runner.go_on()
    await turn


async def test_a_close_is_not_told_as_done_before_the_log_has_it(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)
    a = served.rigs[0]
    a.runner.hold()
    turn = asyncio.create_task(a.run(call([4], "s"), 1))
    await a.begun()
    served.controller.log.away = True
    closing = asyncio.create_task(close(served))
    await asyncio.wait([closing], timeout=0.1)
    assert not closing.done()
    served.controller.log.away = False
    assert await closing
    assert [entry.closes_after for entry in served.cluster.sessions()] != [None], "its turn goes on"
    assert not turn.done()
    a.runner.go_on()
    assert (await turn)[-1].finish is not None
    await ended(served)


async def test_a_session_that_could_not_be_ended_is_ended_by_the_controller(served: Failover) -> None:
    """The log is away when the turn ends that the close waits for."""
    a = served.rigs[0]
    a.runner.hold()
    turn = asyncio.create_task(a.run(call([4], "s"), 1))
    await a.begun()
    assert await close(served)
    served.controller.failures["close_session"] = [StoreError("away")]
    a.runner.go_on()
    assert (await turn)[-1].finish is not None
    await a.settled()
    (entry,) = served.cluster.sessions()
    assert entry.closes_after is not None
    assert a.sessions.snapshot() == [], "it is not reported any more, so the controller ends it"
    await a.books_are_empty()


async def test_a_turn_that_comes_while_its_session_is_ended_waits_for_that(served: Failover) -> None:
    """Such a turn used to be accepted, and then its session ended during the turn."""
    a = served.rigs[0]
    a.runner.step_s = 0.0
    served.controller.gate.clear()
    ending = asyncio.create_task(a.host.close("s", 1))
    while a.sessions.epoch("s") is not None:
        await asyncio.sleep(0)
    turn = asyncio.create_task(a.run(call([4], "s"), 1))
    for _ in range(50):
        await asyncio.sleep(0)
    served.controller.gate.set()
    assert await ending
    error = (await turn)[-1].error
    assert error is not None
    assert error.code == "session_not_found"
    await a.books_are_empty()


async def test_a_close_waits_for_the_load_of_its_session(served: Failover) -> None:
    """The owner used to answer that it did not hold the session. Then the load ended, and it ran turns of a closed
    session. Found by the simulation, seed 31."""
    a = served.rigs[0]
    await a.host.release("s")
    served.controller.gate.clear()
    turn = asyncio.create_task(a.run(call([4], "s"), 1))
    async with asyncio.timeout(WAIT_S):
        while a.host._loading.get(("s", 1)) is None:
            await asyncio.sleep(0.001)
    closing = asyncio.create_task(a.host.close("s", 1))
    await asyncio.sleep(0)
    assert not closing.done()
    served.controller.gate.set()
    assert await closing
    await turn
    await ended(served)
    assert a.sessions.epoch("s") is None
