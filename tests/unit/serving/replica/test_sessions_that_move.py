"""A turn that begins at a crowded replica runs at a less busy one, exactly and once. Nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from controllers.attended_clock import LATE_AFTER_S
from controllers.errors import StaleEpoch, StoreError
from controllers.records import ForkOrder, ReplicaStatus, SessionReport
from serving.front.ownership_cache import Owner
from serving.replica import overlaps, session_offers
from serving.wire.calls import RewindSession
from serving.wire.turns import TurnCall, TurnEvent
from tests.unit.controllers.measured import measured
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, failovers, running_failover
from tests.unit.serving.replica_rig import VOCAB_SIZE, call


class Crowd(Failover):
    """Two replicas and a timer that only `crowd` moves. "a" has session "s"."""

    def __init__(self, failover: Failover, time_s: list[float]) -> None:
        vars(self).update(vars(failover))
        self.time_s = time_s
        self.history: list[int] = []

    async def crowd(self) -> None:
        """From now on "a" has been busy for long and "b" idle, and both know it."""
        for _ in range(60):
            self.time_s[0] += LATE_AFTER_S
            self.cluster.tick()
            for name, running in (("b", 0), ("a", 9)):
                # a report that comes late tells nothing
                self.cluster.heartbeat(ReplicaStatus(name, 1000, 1000, running=running), SessionReport(0, 0))
        for rig in self.rigs:
            await rig.heartbeats.beat()

    async def say(self, new: list[int], call: TurnCall | None = None) -> TurnEvent:
        """Runs a turn, which must answer as a fresh request with the whole history does."""
        event = await self.turn(call or turn_of(new))
        assert event.error is None, event
        assert list(event.token_ids) == null_generate(self.history + new, 8, VOCAB_SIZE)
        assert event.prompt_tokens == len(self.history) + len(new)
        self.history += [*new, *event.token_ids]
        return event

    async def nothing_at(self, name: str) -> None:
        """Checks that this replica has no turns, no history and no KV."""
        rig = self.replicas.rigs[name]
        assert rig.sessions.epoch("s") is None
        await rig.books_are_empty()


def turn_of(new: list[int], key: str | None = None) -> TurnCall:
    return call(new, "s", key=key)


@pytest.fixture
async def crowd(tmp_path: Path) -> AsyncIterator[Crowd]:
    time_s = [0.0]
    async with running_failover(tmp_path, timer=lambda: time_s[0]) as failover:
        for rig in failover.rigs:
            rig.runner.step_s = 0.0
        crowd = Crowd(failover, time_s)
        crowd.open_session("s")
        await crowd.say([1, 2, 3])
        yield crowd
        await crowd.settled()


async def test_the_next_turn_runs_elsewhere_and_says_the_same(crowd: Crowd) -> None:
    assert (await crowd.say([4])).cached_tokens > 0
    await crowd.crowd()
    moved = await crowd.say([5, 6])
    assert (crowd.owner(), moved.cached_tokens) == (("b", 2), 0)
    await crowd.nothing_at("a")
    settled = await crowd.say([7])
    assert (crowd.owner(), settled.cached_tokens) == (("b", 2), len(crowd.history) - 10)
    assert measured(crowd.cluster, "ownership_rebalanced") == 1


async def test_it_is_no_failover_and_no_failure(crowd: Crowd) -> None:
    await crowd.crowd()
    await crowd.say([5])
    assert failovers(crowd.metrics) == 0
    assert crowd.rigs[0].figure("kedge_turns_total", outcome="moved") == 1
    assert crowd.rigs[0].figure("kedge_turns_total", outcome="stale") == 0
    assert 'kedge_move_seconds_count{ingress="i"} 1.0' in crowd.metrics.render()


async def test_it_is_an_audit_event(crowd: Crowd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kedge.audit")
    await crowd.crowd()
    await crowd.say([5])
    (event,) = [record for record in caplog.records if record.name == "kedge.audit"]
    assert (vars(event)["event"], vars(event)["session_id"], vars(event)["epoch"]) == (
        "session_moved",
        "s",
        1,
    )


async def test_the_former_owner_refuses_front_ends_that_remember_it(crowd: Crowd) -> None:
    await crowd.crowd()
    await crowd.say([5])
    events = await crowd.rigs[0].run(turn_of([6]), 1)
    assert events[-1].error is not None
    assert events[-1].error.code == "stale_epoch"
    crowd.owners._cache.put("s", Owner("a", 1))
    await crowd.say([6])
    assert crowd.owner() == ("b", 2)


async def test_keys_of_turns_before_the_move_are_remembered(crowd: Crowd) -> None:
    first = await crowd.say([4], turn_of([4], "before"))
    await crowd.crowd()
    replayed = await crowd.turn(turn_of([4], "before"))
    assert (replayed.replayed, replayed.token_ids) == (True, first.token_ids)
    assert crowd.owner() == ("a", 1), "an answer from the log costs its replica nothing"
    moved = await crowd.say([5], turn_of([5], "on the move"))
    for key, new, told in (("before", [4], first), ("on the move", [5], moved)):
        again = await crowd.turn(turn_of(new, key))
        assert (again.replayed, again.token_ids) == (True, told.token_ids)
    assert crowd.owner() == ("b", 2)


async def test_forks_stay_with_their_kv(crowd: Crowd) -> None:
    at_fork = len(crowd.history)
    await crowd.rigs[0].host.fork("s", 1, ForkOrder("child", "k"))
    await crowd.crowd()
    await crowd.say([5])
    assert (crowd.owner(), crowd.owner("child")) == (("b", 2), ("a", 1))
    for rig in crowd.rigs:
        rig.offers._crowded = [False]
    child = await crowd.turn(replace(turn_of([9]), session=replace(turn_of([9]).session, session_id="child")))
    assert list(child.token_ids) == null_generate([*crowd.history[:at_fork], 9], 8, VOCAB_SIZE)
    assert child.cached_tokens in (at_fork, at_fork - 1)


async def test_a_session_that_was_rewound_moves_too(crowd: Crowd) -> None:
    await crowd.crowd()
    crowd.history = crowd.history[:5]
    await crowd.rigs[0].empty_turns.rewind(RewindSession("s", 1, 5))
    await crowd.say([8])
    assert crowd.owner() == ("b", 2)
    await crowd.nothing_at("a")


async def test_while_it_is_offered_no_other_turn_begins(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlaps, "OVERLAP_PATIENCE_S", 0.0)  # shorter than an offer may take
    await crowd.crowd()
    crowd.controller.gate.clear()
    moving = asyncio.create_task(crowd.say([5]))
    while crowd.rigs[0].sessions.snapshot()[0].in_turn is False:
        await asyncio.sleep(0)
    refused = await crowd.rigs[0].run(turn_of([6]), 1)
    assert refused[-1].error is not None
    assert refused[-1].error.code == "turn_in_flight"
    crowd.controller.gate.set()
    await moving
    assert crowd.owner() == ("b", 2)


async def test_who_comes_as_it_moves_does_not_get_in_the_way(crowd: Crowd) -> None:
    await crowd.crowd()
    crowd.controller.gate.clear()
    turns = crowd.rigs[0].turns
    first = asyncio.create_task(turns.run(turn_of([5]), 1, lambda _: None))
    await crowd.rigs[0].in_turn("s")
    crowd.controller.gate.set()  # the offer is answered; later calls wait again
    crowd.controller.gate.clear()
    second = asyncio.create_task(turns.run(turn_of([6]), 1, lambda _: None))
    error = (await first).error
    assert error is not None
    assert error.code == "session_moved"
    crowd.controller.gate.set()
    error = (await second).error
    assert error is not None
    assert error.code in ("turn_in_flight", "stale_epoch")
    await crowd.nothing_at("a")


async def test_a_session_that_is_to_be_closed_does_not_move(crowd: Crowd) -> None:
    """Its turn ends at its present owner."""
    await crowd.crowd()
    crowd.controller.gate.clear()
    turn = asyncio.create_task(crowd.turn(turn_of([5])))
    await crowd.rigs[0].in_turn("s")
    crowd.cluster.close_after("s", 1, "")  # the answer to this call is late
    closing = asyncio.create_task(crowd.rigs[0].host.close("s", 1))
    await asyncio.sleep(0)
    crowd.controller.gate.set()
    assert await closing
    assert (await turn).finish is not None
    await crowd.settled()
    assert crowd.cluster.sessions() == []
    await crowd.nothing_at("a")


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_close_that_comes_as_the_session_moves_is_for_its_next_owner(
    crowd: Crowd, leaves: bool
) -> None:
    await crowd.crowd()
    crowd.controller.gate.clear()
    turn = asyncio.create_task(crowd.rigs[0].run(turn_of([5]), 1))
    await crowd.rigs[0].in_turn("s")
    closing = asyncio.create_task(crowd.rigs[0].host.close("s", 1))
    await asyncio.sleep(0)
    assert crowd.cluster.offer_session("s", 1, "a")
    if leaves:
        turn.cancel()
        await asyncio.wait([turn])
    crowd.controller.gate.set()
    assert not await closing
    await asyncio.wait([turn])
    await crowd.settled()
    assert crowd.owner() == ("b", 2)
    await crowd.nothing_at("a")


async def test_a_client_that_leaves_while_it_moves_leaves_nothing(crowd: Crowd) -> None:
    await crowd.crowd()
    crowd.controller.gate.clear()
    leaving = asyncio.create_task(crowd.rigs[0].run(turn_of([5]), 1))
    while crowd.rigs[0].sessions.snapshot()[0].in_turn is False:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert not crowd.rigs[0].sessions.snapshot()[0].in_turn
    # The controller may have moved the session all the same.
    assert crowd.cluster.offer_session("s", 1, "a")
    crowd.controller.gate.set()
    await crowd.rigs[0].heartbeats.beat()
    await crowd.nothing_at("a")
    await crowd.say([5])
    assert crowd.owner() == ("b", 2)


async def test_an_offer_whose_answer_was_lost_has_moved_it(crowd: Crowd) -> None:
    await crowd.crowd()
    crowd.controller.lost_replies["offer_session"] = [StaleEpoch("owned by another")]
    steps = crowd.rigs[0].engine.stats().steps
    await crowd.say([5])
    assert crowd.owner() == ("b", 2)
    await crowd.nothing_at("a")
    assert crowd.rigs[0].engine.stats().steps == steps


async def test_a_controller_that_cannot_be_asked_keeps_no_turn_from_running(crowd: Crowd) -> None:
    await crowd.crowd()
    crowd.controller.failures["offer_session"] = [StoreError("no answer")]
    assert (await crowd.say([5])).cached_tokens > 0
    assert crowd.owner() == ("a", 1)


async def test_a_controller_that_is_frozen_keeps_no_turn_from_its_owner(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn of a crowded replica used to wait for the controller for a quarter of a minute."""
    monkeypatch.setattr(session_offers, "OFFER_TIMEOUT_S", 0.05)
    await crowd.crowd()
    crowd.controller.gate.clear()
    turn = asyncio.create_task(crowd.rigs[0].run(turn_of([5]), 1))
    await crowd.rigs[0].pending_commits(1)
    assert not turn.done()
    crowd.controller.gate.set()
    expected = null_generate([*crowd.history, 5], 8, VOCAB_SIZE)
    assert [token for event in await turn for token in event.token_ids] == expected
    assert crowd.owner() == ("a", 1)
    crowd.history += [5, *expected]
    crowd.controller.failures["offer_session"] = [
        AssertionError("asked again, before it has answered anything")
    ]
    await crowd.say([6])


async def test_nobody_is_asked_where_nothing_is_crowded(crowd: Crowd) -> None:
    crowd.controller.failures["offer_session"] = [AssertionError("asked")]
    await crowd.rigs[0].heartbeats.beat()
    assert (await crowd.say([5])).cached_tokens > 0
