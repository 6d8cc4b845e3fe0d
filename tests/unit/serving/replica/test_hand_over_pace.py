"""A draining replica hands over sessions in use one at a time, so that none waits while the others' histories load."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controllers.errors import StoreError
from serving.replica import session_host
from serving.replica.hand_over_pace import HandOverPace
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.replica_rig import VOCAB_SIZE, call

TOKENS_PER_S = 10.0
WITHIN_S = 30.0
NAMES = ("r", "s", "t")
HISTORY = [1, 2, *null_generate([1, 2], 8, VOCAB_SIZE)]


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sessions count as in use, however slow the machine is."""
    monkeypatch.setattr(session_host, "IN_USE_S", 3600.0)


@pytest.fixture
async def served(tmp_path: Path, clock: Clock) -> AsyncIterator[Failover]:
    """Replica "a" drains and has three sessions with 10 tokens each; "b" has nothing."""
    pace = HandOverPace(clock, TOKENS_PER_S, WITHIN_S)
    async with running_failover(tmp_path, pace=pace) as failover:
        for rig in failover.rigs:
            rig.runner.step_s = 0.0
        *others, last = NAMES
        for name in others:
            failover.rigs[0].open_session(name)  # the controller does not know "b" yet
        failover.open_session(last)
        for name in NAMES:
            await failover.turn(call([1, 2], name))
        assert owners(failover) == "aaa"
        failover.cluster.drain_replica("a")
        await failover.rigs[0].host.heartbeat()
        yield failover
        await failover.settled()


def owners(served: Failover) -> str:
    """The owners of the three sessions, in order."""
    return "".join(next(e.replica_id for e in served.cluster.sessions() if e.session_id == n) for n in NAMES)


async def test_turns_that_begin_move_one_at_a_time(served: Failover, clock: Clock) -> None:
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


async def test_between_two_turns_they_go_at_the_same_pace(served: Failover, clock: Clock) -> None:
    for count in (1, 1, 2, 2, 3):
        await served.rigs[0].host.hand_over()
        assert owners(served).count("b") == count
        clock.now_s += 0.5


async def test_one_that_nobody_took_keeps_no_other_from_going(served: Failover) -> None:
    served.controller.failures["offer_session"] = [StoreError("away")]
    await served.turn(call([4], "r"))
    await served.turn(call([4], "s"))
    assert owners(served) == "aba"


async def test_those_that_nobody_uses_go_at_once(served: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_host, "IN_USE_S", 0.0)
    await served.rigs[0].host.hand_over()
    assert owners(served) == "bbb"


async def test_before_the_replica_is_stopped_all_go(served: Failover, clock: Clock) -> None:
    clock.now_s += WITHIN_S
    await served.rigs[0].host.hand_over()
    assert owners(served) == "bbb"


async def test_a_heartbeat_begins_no_drain_anew(served: Failover, clock: Clock) -> None:
    await served.rigs[0].host.hand_over()
    await served.rigs[0].host.heartbeat()
    await served.rigs[0].host.hand_over()
    assert owners(served).count("b") == 1
    clock.now_s += WITHIN_S
    await served.rigs[0].host.heartbeat()
    await served.rigs[0].host.hand_over()
    assert owners(served) == "bbb"
