"""An abort works wherever its turn is: at no replica, on its way to one, or with a client at another ingress."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serving.front import dispatched_turn, session_owners
from serving.wire.turns import TurnCall, TurnEvent
from tests.unit.serving.failover_rig import Failover, at_the_end, behind, running_failover
from tests.unit.serving.local_service import Alone, LocalService
from tests.unit.serving.replica_rig import call


class OtherSibling(Alone):
    """The siblings of an ingress without clients. Its only sibling is `served`."""

    def __init__(self, served: Failover) -> None:
        super().__init__()
        self._served = served

    async def ask(self, method: str, *args: Any) -> list[Any]:
        assert method == "abort"
        self._served.dispatcher.abort(*args)
        return []


def other_ingress(served: Failover) -> LocalService:
    return LocalService(
        served.rigs[0], served.replicas, siblings=OtherSibling(served), failover_timeout_s=30.0
    )


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Failover]:
    async with running_failover(tmp_path, failover_timeout_s=30.0) as failover:
        failover.open_session("s")
        yield failover
        await failover.settled()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.005)
    monkeypatch.setattr(dispatched_turn, "ABORT_TIMEOUT_S", 0.1)


def mine(session: str | None) -> TurnCall:
    return call([5, 6, 7], session, max_new_tokens=400, request_id="mine")


async def aborted(turn: asyncio.Task[TurnEvent]) -> TurnEvent:
    async with asyncio.timeout(10):
        event = await turn
    assert event.finish is not None
    assert event.finish.reason == "abort"
    return event


def failovers(served: Failover) -> float:
    told = re.search(r'kedge_failovers_total{cause="lost",ingress="i"} (\S+)', served.metrics.render())
    return float(told[1]) if told else 0.0


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("everything", [False, True])
async def test_between_two_replicas(served: Failover, session: str | None, everything: bool) -> None:
    served.replicas.losses = {"a": behind(3)}
    served.replicas.dead.add("b")
    turn = asyncio.create_task(served.turn(mine(session)))
    while failovers(served) < 2:
        await asyncio.sleep(session_owners.RETRY_PAUSE_S)
    client = other_ingress(served)
    await client.abort(None, all_requests=True, tenant="another")
    await client.abort("yours", tenant="")
    assert not turn.done()
    await client.abort(None if everything else "mine", all_requests=everything, tenant="")
    event = await aborted(turn)
    assert len(event.token_ids) >= 3
    assert (event.prompt_tokens, event.completion_tokens) == (3, len(event.token_ids))
    assert served.committed("s") == (0, 0)
    served.replicas.dead.clear()
    for rig in served.rigs:
        await rig.heartbeats.beat()  # each replica hears that it counts as gone, and registers again
    assert (await served.turn(call([5, 6, 7], session))).completion_tokens == 8


@pytest.mark.parametrize("session", [None, "s"])
async def test_on_its_way_to_a_replica_that_it_does_not_reach(served: Failover, session: str | None) -> None:
    served.replicas.delivered.clear()
    turn = asyncio.create_task(served.turn(mine(session)))
    while not served.replicas.calls:
        await asyncio.sleep(0)
    await other_ingress(served).abort("mine", tenant="")
    assert (await aborted(turn)).token_ids == ()
    served.replicas.delivered.set()
    assert (await served.turn(call([5, 6, 7], session))).completion_tokens == 8


@pytest.mark.parametrize("session", [None, "s"])
async def test_it_overtakes_the_call(
    served: Failover, monkeypatch: pytest.MonkeyPatch, session: str | None
) -> None:
    """The replica that gets the call later is told of the abort again, and reports itself how the turn ended."""
    monkeypatch.setattr(dispatched_turn, "ABORT_TIMEOUT_S", 30.0)
    served.replicas.delivered.clear()
    turn = asyncio.create_task(served.turn(mine(session)))
    while not served.replicas.calls:
        await asyncio.sleep(0)
    await other_ingress(served).abort("mine", tenant="")
    served.replicas.delivered.set()
    assert len((await aborted(turn)).token_ids) < 400
    assert served.rigs[0].figure("kedge_turns_total", outcome="aborted") == 1
    assert served.committed("s") == (0, 0)


@pytest.mark.parametrize("committed", [False, True])
async def test_its_replica_is_lost_before_it_can_say_how_the_turn_ended(
    served: Failover, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """The next replica finds out whether the turn was committed. If the client hears of an abort, its session has no
    such turn."""
    monkeypatch.setattr(dispatched_turn, "ABORT_TIMEOUT_S", 30.0)

    def lost(number: int, event: TurnEvent) -> bool:
        if not (at_the_end if committed else behind(3))(number, event):
            return False
        served.dispatcher.abort("mine", "")
        return True

    served.replicas.losses = {"a": lost}
    turn = asyncio.create_task(served.turn(call([5, 6, 7], "s", max_new_tokens=30, request_id="mine")))
    if committed:
        event = await turn
        assert event.finish is not None
        assert (event.finish.reason, event.completion_tokens) == ("length", 30)
    else:
        event = await aborted(turn)
        assert 3 <= len(event.token_ids) < 30
    assert served.committed("s") == ((1, 33) if committed else (0, 0))


async def test_it_does_not_outlive_the_turn(served: Failover) -> None:
    """A later turn of the same name is not aborted."""
    asked = call([5, 6, 7], "s", request_id="mine")
    assert (await served.turn(asked)).completion_tokens == 8
    await other_ingress(served).abort("mine", tenant="")
    assert (await served.turn(asked)).completion_tokens == 8
