"""A draining replica hands its sessions over between turns, and lets its turns in flight end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controllers.errors import NoAnswer, NoReplica, SessionNotFound, StoreError
from serving.replica import drain, session_offers
from tests.unit.controllers.measured import measured
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, failovers, running_failover
from tests.unit.serving.replica_rig import VOCAB_SIZE, call, tokens_of

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
        await failover.settled()


async def begin_drain(served: Failover) -> None:
    """Lets replica "a" drain."""
    await served.rigs[0].drain.order()


async def test_idle_sessions_are_handed_over_with_nothing_left_behind(served: Failover) -> None:
    await begin_drain(served)
    await served.rigs[0].drain.hand_over()
    assert served.owner() == ("b", 2)
    assert served.rigs[0].sessions.epoch("s") is None
    await served.rigs[0].books_are_empty()
    history = FIRST + null_generate(FIRST, 8, VOCAB_SIZE)
    event = await served.turn(call([4], "s"))
    assert list(event.token_ids) == null_generate([*history, 4], 8, VOCAB_SIZE)
    assert measured(served.cluster, "ownership_drained") == 1


async def test_a_turn_that_comes_before_is_run_elsewhere(served: Failover) -> None:
    """It also works through an ingress that remembers the owner, because the owner itself lets the session go."""
    await begin_drain(served)
    event = await served.turn(call([4], "s"))
    assert event.error is None
    assert served.owner() == ("b", 2)
    assert failovers(served.metrics) == 0


async def test_a_turn_that_comes_while_its_session_is_handed_over_waits(served: Failover) -> None:
    """Such a turn used to be refused with 409 turn_in_flight."""
    await begin_drain(served)
    served.controller.gate.clear()
    handing_over = asyncio.create_task(served.rigs[0].drain.hand_over())
    await served.rigs[0].in_turn("s")
    turn = asyncio.create_task(served.turn(call([4], "s")))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not turn.done()
    served.controller.gate.set()
    assert (await turn).error is None
    await handing_over
    assert served.owner() == ("b", 2)


async def test_a_turn_in_flight_ends_where_it_began(served: Failover) -> None:
    a = served.rigs[0]
    a.runner.hold()
    turn = asyncio.create_task(a.run(call([4], "s"), 1))
    await a.begun()
    await begin_drain(served)
    await a.drain.hand_over()
    assert served.owner() == ("a", 1)
    a.runner.go_on()
    assert len(tokens_of(await turn)) == 8
    await a.settled()
    await a.drain.hand_over()
    assert served.owner() == ("b", 2)
    assert served.committed("s")[0] == 2


async def test_where_nobody_can_take_them_they_stay_and_go_on(served: Failover) -> None:
    await begin_drain(served)
    served.cluster.report_unreachable("b", True)
    await served.rigs[0].drain.hand_over()
    assert served.owner() == ("a", 1)
    assert (await served.turn(call([4], "s"))).error is None
    assert served.owner() == ("a", 1)


async def test_a_log_that_is_away_keeps_them_where_they_are(served: Failover) -> None:
    await begin_drain(served)
    served.controller.failures["offer_session"] = [StoreError("away")]
    await served.rigs[0].drain.hand_over()
    assert served.owner() == ("a", 1)
    await served.rigs[0].drain.hand_over()
    assert served.owner() == ("b", 2)


class Unanswered:
    """Offers of session "s" are not answered: the controller hangs, or the `failure` is all that is told of them.
    `offered` are all sessions that were offered."""

    def __init__(self, served: Failover, failure: Exception | None) -> None:
        self.offered: list[str] = []
        self.mended = False
        self._offer = served.controller.offer_session
        self._failure = failure
        served.controller.offer_session = self.offer_session

    async def offer_session(self, session_id: str, epoch: int, replica_id: str) -> bool:
        self.offered.append(session_id)
        if session_id == "s" and not self.mended:
            if self._failure is None:
                await asyncio.Event().wait()
            else:
                raise self._failure
        return bool(await self._offer(session_id, epoch, replica_id))


@pytest.fixture
async def three(served: Failover, monkeypatch: pytest.MonkeyPatch) -> Failover:
    """Two more sessions at "a", and none of them is in use. "s" has been idle for longest, and so is offered first."""
    monkeypatch.setattr(drain, "IN_USE_S", 0.0)
    monkeypatch.setattr(session_offers, "OFFER_TIMEOUT_S", 0.05)
    for name in ("t", "u"):
        served.cluster.report_unreachable("b", True)  # until the session is open
        served.open_session(name)
        await served.turn(call(FIRST, name))
    await begin_drain(served)
    return served


@pytest.mark.parametrize(
    "failure", [None, StoreError("away"), SessionNotFound("not in the ledger"), RuntimeError("a bug")]
)
async def test_a_session_that_cannot_be_offered_keeps_no_other(
    three: Failover, failure: Exception | None
) -> None:
    """It used to end each round of the hand-over, and the next one began with it again. After an error that is not
    typed it also took no turn any more."""
    unanswered, rig = Unanswered(three, failure), three.rigs[0]
    for _ in range(2):
        await rig.drain.hand_over()
    assert [three.owner(name)[0] for name in "stu"] == ["a", "b", "b"]
    assert unanswered.offered == ["s", "t", "u", "s"]
    assert not any(status.in_turn for status in rig.sessions.snapshot())
    assert rig.drain.hands_over, "it may be answered yet"
    unanswered.mended = True
    await rig.drain.hand_over()
    assert rig.drain.emptied


async def test_a_shard_that_hangs_keeps_no_session_of_the_others(
    three: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of the hand-over waits for it once."""
    unanswered, rig = Unanswered(three, None), three.rigs[0]
    monkeypatch.setattr(three.controller, "shard_of", lambda key: int(key == "s"))
    rig.offers._crowded = [False, False]
    await rig.drain.hand_over()
    assert [three.owner(name)[0] for name in "stu"] == ["a", "b", "b"]
    assert unanswered.offered == ["s", "t", "u"]


async def test_a_full_session_is_handed_over_too(served: Failover) -> None:
    served.open_session("full", capacity_tokens=4)
    await served.turn(call([7, 8], "full", max_new_tokens=2))
    await begin_drain(served)
    await served.rigs[0].drain.hand_over()
    assert served.owner("full")[0] == "b"


async def test_an_operators_drain_empties_it_for_good(served: Failover) -> None:
    rig = served.rigs[0]
    await rig.drain.order()
    assert not rig.drain.emptied
    await rig.drain.hand_over()
    assert rig.drain.emptied
    await rig.heartbeats.farewell()
    served.open_session("new")
    assert served.owner("new")[0] == "b"


async def test_a_drain_whose_answer_is_lost_is_heard_of_with_a_heartbeat(served: Failover) -> None:
    """The controller used to give such a replica no sessions, but nothing emptied it, so it stayed like that
    forever."""
    rig = served.rigs[0]
    served.controller.failures["drain_replica"] = [NoAnswer("cut off")]
    with pytest.raises(NoAnswer):
        await rig.drain.order()
    served.cluster.drain_replica("a")  # the call had arrived, only its answer was lost
    await rig.heartbeats.beat()
    await rig.drain.hand_over()
    assert rig.drain.emptied


async def test_a_drain_is_refused_where_nobody_else_is(served: Failover) -> None:
    served.cluster.report_unreachable("b", True)
    with pytest.raises(NoReplica):
        await served.rigs[0].drain.order()
    await served.rigs[0].heartbeats.beat()
    await served.rigs[0].drain.offer("s", 1)  # "a" does not drain, so nothing is offered


@pytest.mark.parametrize("first", ["close", "move"])
async def test_a_close_that_comes_while_a_session_is_handed_over_is_carried_out(
    served: Failover, first: str
) -> None:
    """If the move comes first, the close goes to the next owner: the ingress asks there then."""
    host = served.rigs[0].host
    await begin_drain(served)
    served.controller.gate.clear()
    handing_over = asyncio.create_task(served.rigs[0].drain.hand_over())
    await served.rigs[0].in_turn("s")
    if first == "close":
        served.cluster.close_after("s", 1, "")
    closing = asyncio.create_task(host.close("s", 1))
    await asyncio.sleep(0)
    served.controller.gate.set()
    await handing_over
    assert await closing == (first == "close")
    assert [entry.replica_id for entry in served.cluster.sessions()] == ([] if first == "close" else ["b"])
    assert served.rigs[0].sessions.snapshot() == []


@pytest.mark.parametrize("stale", [False, True])
async def test_a_heartbeat_does_not_wait_for_the_engines_step(served: Failover, stale: bool) -> None:
    """A heartbeat used to take as long as the step, or ten seconds, so a slow step looked like a dead replica. The same
    happened where a heartbeat dropped a session that this replica no longer owns (simulated seed 22701 of 10 turns)."""
    a = served.rigs[0]
    if stale:
        served.cluster.close_session("s")
    a.runner.hold()
    turn = asyncio.create_task(a.run(call([4], None if stale else "s"), 1))
    await a.begun()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(3):
        await a.heartbeats.beat()
    assert loop.time() - began_s < 4.0, "three heartbeats of a step that takes sixty seconds"
    assert [each.session_id for each in a.sessions.snapshot()] == ([] if stale else ["s"])
    a.runner.go_on()
    await turn
