"""The state machine of a drain, and its pace: sessions in use go one at a time, so that none waits while the histories
of the others load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from controllers.errors import NoReplica, StoreError
from controllers.records import SessionStatus
from controllers.turns import Turn
from serving.replica import drain
from serving.replica.drain import DRAIN_AGAIN_S, LAST_ANSWERS_S, HandOvers, ReplicaDrain
from serving.replica.session_offers import Offered
from tests.unit.controllers.manual_clock import ManualClock
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.replica_rig import DRAIN_WITHIN_S, VOCAB_SIZE, WAIT_S, call

TOKENS_PER_S = 10.0
NAMES = ("r", "s", "t")
HISTORY = [1, 2, *null_generate([1, 2], 8, VOCAB_SIZE)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def hand_overs(clock: ManualClock) -> HandOvers:
    return HandOvers(clock, TOKENS_PER_S, DRAIN_WITHIN_S)


@pytest.fixture(autouse=True)
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sessions count as in use, however slow the machine is."""
    monkeypatch.setattr(drain, "IN_USE_S", 3600.0)


@pytest.fixture
async def up(tmp_path: Path, clock: ManualClock) -> AsyncIterator[Failover]:
    """Replica "a" has three sessions with 10 tokens each; "b" has nothing."""
    settings = {"rebalancing": {"tokens_per_s": TOKENS_PER_S}}
    async with running_failover(tmp_path, clock=clock, settings=settings) as failover:
        for rig in failover.rigs:
            rig.runner.step_s = 0.0
        *others, last = NAMES
        for name in others:
            failover.rigs[0].open_session(name)  # the controller does not know "b" yet
        failover.open_session(last)
        for name in NAMES:
            await failover.turn(call([1, 2], name))
        assert owners(failover) == "aaa"
        yield failover
        await failover.settled()


@pytest.fixture
async def served(up: Failover) -> Failover:
    """Replica "a" drains. It heard of that with a heartbeat."""
    up.cluster.drain_replica("a")
    await up.rigs[0].heartbeats.beat()
    return up


def owners(served: Failover) -> str:
    """The owners of the three sessions, in order."""
    return "".join(next(e.replica_id for e in served.cluster.sessions() if e.session_id == n) for n in NAMES)


async def drained_without_takers(served: Failover, clock: ManualClock) -> ReplicaDrain:
    """The drain of "a" after a round in which all sessions might go, and "b" is away."""
    a = served.rigs[0].drain
    clock.advance(DRAIN_WITHIN_S)
    served.cluster.report_unreachable("b", True)
    await a.hand_over()
    return a


async def test_turns_that_begin_move_one_at_a_time(served: Failover, clock: ManualClock) -> None:
    """All sessions used to move with their next turns. At the new owner each turn then waited for the histories of all
    other sessions."""
    for name in NAMES:
        event = await served.turn(call([4], name))
        assert list(event.token_ids) == null_generate([*HISTORY, 4], 8, VOCAB_SIZE)
    assert owners(served) == "baa"
    clock.now_s += 0.9
    await served.turn(call([5], "s"))
    assert owners(served) == "baa", "10 tokens take a second"
    clock.now_s += 0.1
    await served.turn(call([6], "t"))
    await served.turn(call([6], "s"))
    assert owners(served) == "bab"


async def test_between_two_turns_they_go_at_the_same_pace(served: Failover, clock: ManualClock) -> None:
    for count in (1, 1, 2, 2, 3):
        await served.rigs[0].drain.hand_over()
        assert owners(served).count("b") == count
        clock.now_s += 0.5


async def test_one_that_nobody_took_keeps_no_other_from_going(served: Failover) -> None:
    served.controller.failures["offer_session"] = [StoreError("away")]
    await served.turn(call([4], "r"))
    await served.turn(call([4], "s"))
    assert owners(served) == "aba"


async def test_those_that_nobody_uses_go_at_once(served: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "IN_USE_S", 0.0)
    await served.rigs[0].drain.hand_over()
    assert owners(served) == "bbb"


async def test_before_the_replica_is_stopped_all_go(served: Failover, clock: ManualClock) -> None:
    clock.now_s += DRAIN_WITHIN_S
    await served.rigs[0].drain.hand_over()
    assert owners(served) == "bbb"


async def test_while_nobody_takes_them_it_looks_at_all_sessions_once_a_second(
    served: Failover, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a whole service was stopped, each replica looked at all of its sessions ten times a second: with 25,000 of
    them its turns got tokens half of the time."""
    a = served.rigs[0]
    looks = []
    snapshot = a.sessions.snapshot
    monkeypatch.setattr(a.sessions, "snapshot", lambda: looks.append(clock()) or snapshot())
    served.cluster.report_unreachable("b", True)
    for _ in range(20):
        await a.drain.hand_over()
        clock.advance(DRAIN_AGAIN_S / 10)
    assert len(looks) == 2
    served.cluster.register_replica(served.rigs[1].heartbeats.status())
    clock.now_s += DRAIN_WITHIN_S
    await a.drain.hand_over()
    assert owners(served) == "bbb"


async def test_a_heartbeat_begins_no_drain_anew(served: Failover, clock: ManualClock) -> None:
    await served.rigs[0].drain.hand_over()
    await served.rigs[0].heartbeats.beat()
    await served.rigs[0].drain.hand_over()
    assert owners(served).count("b") == 1
    clock.now_s += DRAIN_WITHIN_S
    await served.rigs[0].heartbeats.beat()
    await served.rigs[0].drain.hand_over()
    assert owners(served) == "bbb"


async def test_a_session_that_is_used_while_others_are_offered_goes_at_the_pace(
    served: Failover, clock: ManualClock
) -> None:
    """A round used to go by what it had found at its beginning."""
    a = served.rigs[0]
    a.sessions._clock = lambda: clock() + 7200.0  # nobody has used them for two hours
    served.controller.gate.clear()
    handing_over = asyncio.create_task(a.drain.hand_over())
    await a.in_turn("r")
    for name in ("s", "t"):
        used = a.sessions.begin_turn(name, 1)
        assert isinstance(used, Turn)
        a.sessions.abort_turn(used)
    served.controller.gate.set()
    await handing_over
    assert owners(served) == "bba"


async def test_a_session_with_a_turn_costs_the_pace_nothing(served: Failover, clock: ManualClock) -> None:
    """A turn that began while others were offered used to count as a session that had gone."""
    a = served.rigs[0]
    served.controller.gate.clear()
    handing_over = asyncio.create_task(a.drain.hand_over())
    await a.in_turn("r")
    fork = a.sessions.begin_fork("s", 1, 0)
    clock.advance(1.0)
    served.controller.gate.set()
    await handing_over
    a.sessions.abort_fork(fork)
    assert owners(served) == "bab"


class TestHandOvers:
    def test_those_idle_for_longest_are_first_and_those_not_answered_last(
        self, hand_overs: HandOvers
    ) -> None:
        held = [status(name, idle_s) for name, idle_s in (("x", 1.0), ("y", 3.0), ("z", 2.0))]
        assert hand_overs.in_order(held) == ["y", "z", "x"]
        hand_overs.told("y", Offered.NO_ANSWER)
        assert hand_overs.in_order(held) == ["z", "x", "y"]
        hand_overs.told("y", Offered.NO_TAKER)
        assert hand_overs.in_order(held) == ["y", "z", "x"]

    def test_one_that_left_and_came_back_is_not_last_any_more(self, hand_overs: HandOvers) -> None:
        hand_overs.told("y", Offered.NO_ANSWER)
        assert hand_overs.in_order([status("x", 1.0)]) == ["x"]
        assert hand_overs.in_order([status("x", 1.0), status("y", 2.0)]) == ["y", "x"]

    def test_the_next_may_go_when_the_history_of_the_last_is_computed(
        self, hand_overs: HandOvers, clock: ManualClock
    ) -> None:
        assert hand_overs.may_go("x", 20)
        hand_overs.told("x", Offered.MOVED)
        clock.advance(1.9)
        assert not hand_overs.may_go("z", 10)
        clock.advance(0.1)
        assert hand_overs.may_go("z", 10)

    @pytest.mark.parametrize("offered", [Offered.NO_TAKER, Offered.NO_ANSWER])
    def test_one_that_stays_costs_nothing(self, hand_overs: HandOvers, offered: Offered) -> None:
        assert hand_overs.may_go("x", 20)
        hand_overs.told("x", offered)
        assert hand_overs.may_go("z", 10)

    def test_one_that_nobody_uses_and_that_stays_changes_no_pace(
        self, hand_overs: HandOvers, clock: ManualClock
    ) -> None:
        """Where a shard was silent, each offer of its idle sessions let the next session of another shard go."""
        assert hand_overs.may_go("x", 20)
        hand_overs.told("x", Offered.MOVED)
        hand_overs.told("idle", Offered.NO_ANSWER)
        assert not hand_overs.may_go("z", 10)
        clock.advance(2.0)
        assert hand_overs.may_go("z", 10)


class TestStates:
    async def test_a_replica_is_up_until_an_order_is_accepted(self, up: Failover) -> None:
        a = up.rigs[0].drain
        up.cluster.report_unreachable("b", True)
        with pytest.raises(NoReplica):
            await a.order()
        assert (a.draining, a.drained, a.emptied, a.hands_over) == (False, False, False, False)
        assert not a.end_if_empty()
        up.cluster.register_replica(up.rigs[1].heartbeats.status())
        await a.order()
        assert (a.draining, a.drained, a.emptied, a.hands_over) == (True, False, False, True)

    async def test_one_without_sessions_is_emptied_but_up_until_it_drains(self, up: Failover) -> None:
        b = up.rigs[1].drain
        assert not b.emptied
        b.begin()
        assert b.emptied
        assert not b.hands_over
        assert not b.drained

    async def test_it_ends_once_and_only_after_the_last_answer_has_arrived(
        self, up: Failover, clock: ManualClock
    ) -> None:
        b = up.rigs[1].drain
        b.begin()
        b.answered()
        clock.advance(LAST_ANSWERS_S)
        assert not b.end_if_empty()
        clock.advance(0.1)
        assert b.end_if_empty()
        assert not b.end_if_empty(), "it says farewell once"
        b.begin()
        assert (b.draining, b.drained, b.emptied) == (True, True, True)

    async def test_it_does_not_end_while_it_has_a_session_or_a_call(
        self, served: Failover, clock: ManualClock
    ) -> None:
        a = served.rigs[0]
        clock.advance(DRAIN_WITHIN_S)
        assert not a.drain.end_if_empty()
        await a.drain.hand_over()
        assert a.drain.emptied
        a.runner.hold()
        turn = asyncio.create_task(a.run(call([7])))
        await a.begun()
        assert not a.drain.end_if_empty()
        a.runner.go_on()
        await turn
        await a.settled()
        assert a.drain.end_if_empty()

    async def test_the_end_is_prepared_until_all_have_gone(self, up: Failover, clock: ManualClock) -> None:
        a = up.rigs[0].drain
        clock.advance(LAST_ANSWERS_S + 0.1)
        retiring = asyncio.create_task(a.retire(WAIT_S))
        await until(lambda: a.draining)
        assert not retiring.done()
        clock.advance(DRAIN_WITHIN_S)
        await a.hand_over()
        await retiring
        assert owners(up) == "bbb"

    async def test_the_end_does_not_wait_where_nobody_takes_them(
        self, served: Failover, clock: ManualClock
    ) -> None:
        a = await drained_without_takers(served, clock)
        await asyncio.wait_for(a.retire(3600.0), WAIT_S)
        assert owners(served) == "aaa"

    async def test_whether_anybody_takes_them_is_what_the_last_round_found(
        self, served: Failover, clock: ManualClock
    ) -> None:
        a = await drained_without_takers(served, clock)
        assert not a.hands_over
        served.controller.failures["offer_session"] = [StoreError("away")]
        clock.advance(DRAIN_AGAIN_S)
        await a.hand_over()
        assert a.hands_over, "it is not known"
        await a.hand_over()
        assert not a.hands_over
        served.cluster.register_replica(served.rigs[1].heartbeats.status())
        clock.advance(DRAIN_AGAIN_S)
        await a.hand_over()
        assert (a.hands_over, a.emptied) == (False, True)

    async def test_the_end_is_not_prepared_for_longer_than_there_is_time(self, served: Failover) -> None:
        await asyncio.wait_for(served.rigs[0].drain.retire(0.05), WAIT_S)
        assert owners(served) == "aaa"

    @pytest.mark.parametrize("failure", [NoReplica("none is heard yet"), RuntimeError("a bug")])
    async def test_an_order_that_was_refused_is_tried_again_at_the_end(
        self, up: Failover, clock: ManualClock, failure: Exception
    ) -> None:
        """After an error that is not typed the replica used to stop at once, with all of its turns."""
        a = up.rigs[0].drain
        up.controller.failures["drain_replica"] = [failure]
        a.answered()
        retiring = asyncio.create_task(a.retire(WAIT_S))
        await until(lambda: not up.controller.failures["drain_replica"])
        clock.advance(DRAIN_AGAIN_S)
        await until(lambda: a.draining)
        clock.advance(DRAIN_WITHIN_S)
        await a.hand_over()
        await retiring
        assert owners(up) == "bbb"


def status(session_id: str, idle_s: float) -> SessionStatus:
    return SessionStatus(session_id, 1, 10, 1, idle_s, False)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)
