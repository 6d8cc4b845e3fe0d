"""A session that an operator moves goes between two turns, and once. Its new owner gives the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controllers.errors import NoAnswer, StaleEpoch
from controllers.records import ForkOrder
from serving.wire.calls import MoveSession
from serving.wire.turns import MovedSession, ServiceError
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, failovers, running_failover
from tests.unit.serving.replica_rig import VOCAB_SIZE, call

FIRST = [1, 2, 3]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Failover]:
    """Two replicas: "a" has session "s" with a turn in its history, "b" has nothing."""
    async with running_failover(tmp_path) as failover:
        for rig in failover.rigs:
            rig.runner.step_s = 0.0
        failover.open_session("s")
        await failover.turn(call(FIRST, "s"))
        yield failover
        for rig in failover.rigs:
            rig.runner.go_on()
        await failover.settled()


async def move(served: Failover, to: str | None = "b", session_id: str = "s") -> MovedSession:
    return await served.service.move_session(session_id, to, tenant="")


async def refusal(
    served: Failover, to: str | None = "b", session_id: str = "s"
) -> tuple[int, str, str | None]:
    with pytest.raises(ServiceError) as caught:
        await move(served, to, session_id)
    info = caught.value.info
    return info.status, info.code, info.param


async def next_turn_is_right(served: Failover) -> None:
    history = FIRST + null_generate(FIRST, 8, VOCAB_SIZE)
    event = await served.turn(call([4], "s"))
    assert event.error is None, event
    assert list(event.token_ids) == null_generate([*history, 4], 8, VOCAB_SIZE)


@pytest.mark.parametrize("to", ["b", None])
async def test_it_moves_with_nothing_left_behind(served: Failover, to: str | None) -> None:
    assert await move(served, to) == MovedSession("a", "b", 2)
    assert served.owner() == ("b", 2)
    assert served.rigs[0].sessions.epoch("s") is None
    await served.rigs[0].books_are_empty()
    await next_turn_is_right(served)
    assert served.owner() == ("b", 2)


async def test_its_kv_is_computed_again(served: Failover) -> None:
    await move(served)
    assert (await served.turn(call([4], "s"))).cached_tokens == 0
    assert (await served.turn(call([5], "s"))).cached_tokens > 0


async def test_it_stays_where_it_is_to_be(served: Failover) -> None:
    assert await move(served, "a") == MovedSession("a", "a", 1)
    assert (await served.turn(call([4], "s"))).cached_tokens > 0


async def test_there_and_back(served: Failover) -> None:
    await move(served, "b")
    assert await move(served, "a") == MovedSession("b", "a", 3)
    await next_turn_is_right(served)


async def test_a_turn_in_flight_keeps_it(served: Failover) -> None:
    served.rigs[0].runner.hold()
    turn = asyncio.create_task(served.rigs[0].run(call([4], "s"), 1))
    await served.rigs[0].runner.held()
    assert await refusal(served) == (409, "turn_in_flight", "session_id")
    served.rigs[0].runner.go_on()
    assert (await turn)[-1].finish is not None
    assert served.owner() == ("a", 1)
    assert (await move(served)).replica_id == "b"


async def test_what_is_not_there_is_named(served: Failover) -> None:
    assert await refusal(served, "z") == (400, "invalid_move", "to")
    assert await refusal(served, session_id="unknown") == (404, "session_not_found", "session_id")
    assert served.owner() == ("a", 1)
    assert (await served.turn(call([4], "s"))).cached_tokens > 0, "what is refused costs it nothing"


async def test_a_replica_that_drains_takes_none(served: Failover) -> None:
    await served.rigs[1].drain.order()
    for to in ("b", None):
        status, code, _ = await refusal(served, to)
        assert (status, code) == (503, "no_replica")
    await next_turn_is_right(served)
    assert served.owner() == ("a", 1)


async def test_a_turn_that_comes_meanwhile_runs_at_the_new_owner(served: Failover) -> None:
    served.controller.gate.clear()
    moving = asyncio.create_task(served.rigs[0].moves.move(_order("b")))
    await served.rigs[0].in_turn("s")
    turn = asyncio.create_task(next_turn_is_right(served))
    await asyncio.sleep(0)
    served.controller.gate.set()
    assert (await moving).replica_id == "b"
    await turn
    assert served.owner() == ("b", 2)


async def test_a_fork_is_waited_for(served: Failover) -> None:
    served.controller.gate.clear()
    fork = asyncio.create_task(served.rigs[0].host.fork("s", 1, ForkOrder("child", "k")))
    await served.rigs[0].in_turn("s")
    moving = asyncio.create_task(served.rigs[0].moves.move(_order("b")))
    await asyncio.sleep(0)
    served.controller.gate.set()
    assert (await fork).session_id == "child"
    await moving
    assert (served.owner(), served.owner("child")) == (("b", 2), ("a", 1))


async def test_a_fork_that_waited_beside_it_finds_it_moved(served: Failover) -> None:
    """It used to be refused with 409 turn_in_flight, though no turn was in flight."""
    rig = served.rigs[0]
    served.controller.gate.clear()
    first = asyncio.create_task(rig.host.fork("s", 1, ForkOrder("child", "k")))
    await rig.in_turn("s")
    moving = asyncio.create_task(rig.moves.move(_order("b")))
    await asyncio.sleep(0)
    second = asyncio.create_task(rig.host.fork("s", 1, ForkOrder("child2", "k2")))
    await asyncio.sleep(0)
    served.controller.gate.set()
    await first
    assert (await moving).replica_id == "b"
    with pytest.raises(StaleEpoch):  # which the front end asks the new owner for
        await second
    assert served.owner() == ("b", 2)


async def test_whose_caller_leaves_it_moves_all_the_same(served: Failover) -> None:
    served.controller.gate.clear()
    moving = asyncio.create_task(served.rigs[0].moves.move(_order("b")))
    await served.rigs[0].in_turn("s")
    moving.cancel()
    await asyncio.wait([moving])
    served.controller.gate.set()
    await served.settled()
    assert served.owner() == ("b", 2)
    await served.rigs[0].books_are_empty()


@pytest.mark.parametrize("to", ["b", None])
@pytest.mark.parametrize("lost", [NoAnswer("lost"), StaleEpoch("by an earlier try")])
async def test_an_answer_that_is_lost_moves_it_once(
    served: Failover, to: str | None, lost: Exception
) -> None:
    served.controller.lost_replies["move_session"] = [lost]
    assert await move(served, to) == MovedSession("a", "b", 2)
    assert served.owner() == ("b", 2)
    await served.rigs[0].books_are_empty()
    await next_turn_is_right(served)


async def test_another_front_end_finds_it_again(served: Failover) -> None:
    await served.rigs[0].moves.move(_order("b"))
    await next_turn_is_right(served)  # the dispatcher still remembers "a"
    assert failovers(served.metrics) == 0


def _order(to: str) -> MoveSession:
    return MoveSession("s", 1, to, 1)
