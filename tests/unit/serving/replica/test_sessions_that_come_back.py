"""No turn uses KV of a history that its session no longer has, whatever becomes of the message that frees this KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from controllers.records import ForkOrder
from engine.api import SessionBusy
from serving.replica import engine_answers
from serving.wire.calls import RewindSession
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, local_controller, running_rig, tokens_of


class TwoOwners:
    """Replicas "a" and "b" of one cluster, and session "s", which begins at "a"."""

    def __init__(self, rigs: dict[str, Rig]) -> None:
        self.rigs = rigs
        self.cluster = rigs["a"].controller.cluster
        self.epoch = rigs["a"].open_session("s")
        self.history: list[int] = []

    def move_to(self, name: str) -> Rig:
        """Reports the other replica as lost, so that the controller gives the session to `name`."""
        for rig in self.rigs.values():
            self.cluster.register_replica(rig.heartbeats.status())
        (other,) = self.rigs.keys() - {name}
        self.cluster.report_unreachable(other, True)
        assignment = self.cluster.resolve("s", False, "")
        assert assignment.replica_id == name
        self.epoch = assignment.epoch
        return self.rigs[name]

    async def say(self, rig: Rig, new: list[int], keep: int | None = None) -> int:
        """Runs a turn, which must answer as a fresh request with the whole history does. Returns how much KV it
        found."""
        if keep is not None:
            await rig.empty_turns.rewind(RewindSession("s", self.epoch, keep))
        events = await rig.run(call(new, "s"), self.epoch)
        prompt = [*self.history[:keep], *new]
        assert tokens_of(events) == null_generate(prompt, 8, VOCAB_SIZE), events[-1].error
        self.history = prompt + tokens_of(events)
        return events[-1].cached_tokens


@pytest.fixture
async def owners(tmp_path: Path) -> AsyncIterator[TwoOwners]:
    async with AsyncExitStack() as stack:
        controller = local_controller(tmp_path)
        rigs = {
            name: await stack.enter_async_context(
                running_rig(tmp_path, replica_id=name, controller=controller)
            )
            for name in "ab"
        }
        yield TwoOwners(rigs)
        for rig in rigs.values():
            await rig.settled()
            report = await asyncio.wrap_future(rig.engine.audit())
            assert report.clean, report


def failing(reason: Exception | None) -> Any:
    """A close_session for an engine that frees nothing. It fails with `reason`; with None it never answers."""

    def close_session(_session_id: str) -> Future[None]:
        future: Future[None] = Future()
        if reason is not None:
            future.set_exception(reason)
        return future

    return close_session


async def left_and_continued_elsewhere(owners: TwoOwners) -> Rig:
    """Runs a turn at "a". Then "b" rewinds and continues the session. "a" gets it back and still has KV of the old
    history."""
    await owners.say(owners.rigs["a"], [1, 2, 3])
    await owners.say(owners.move_to("b"), [50, 51], keep=6)
    rig = owners.move_to("a")
    assert await asyncio.wrap_future(rig.engine.session_kv_tokens()) == {"s": 10}
    return rig


async def test_a_session_that_comes_during_a_step_is_submitted_in_it(
    owners: TwoOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn does not wait for stale KV to be freed, because the engine frees it before the turn. It used to wait for
    the step."""
    rig = await left_and_continued_elsewhere(owners)
    monkeypatch.setattr(engine_answers, "ENGINE_TIMEOUT_S", 3600.0)
    rig.runner.hold()
    other = asyncio.create_task(rig.run(call([9], max_new_tokens=2)))
    await rig.runner.held()
    turn = asyncio.create_task(owners.say(rig, [60]))
    await rig.begun(2)
    rig.runner.go_on()
    await turn
    assert tokens_of(await other) == null_generate([9], 2, VOCAB_SIZE)


@pytest.mark.parametrize("reason", [None, SessionBusy("session s has a turn in flight")])
async def test_kv_that_was_not_freed_is_used_as_far_as_the_history_agrees(
    owners: TwoOwners, monkeypatch: pytest.MonkeyPatch, reason: Exception | None
) -> None:
    rig = await left_and_continued_elsewhere(owners)
    monkeypatch.setattr(engine_answers, "ENGINE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(rig.engine, "close_session", failing(reason))
    assert await owners.say(rig, [60]) == 6
    assert await owners.say(rig, [61]) == len(owners.history) - 10


async def test_a_fork_shares_its_parent_s_kv_as_far_as_the_history_agrees(
    owners: TwoOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await left_and_continued_elsewhere(owners)
    monkeypatch.setattr(engine_answers, "ENGINE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(rig.engine, "close_session", failing(SessionBusy("session s has a turn in flight")))
    forked = await rig.host.fork("s", owners.epoch, ForkOrder("child", "key", length=9))
    assert forked.cached_tokens == 6
    events = await rig.run(call([70], "child"), 1)
    assert tokens_of(events) == null_generate([*owners.history[:9], 70], 8, VOCAB_SIZE)
    await owners.say(rig, [71])


async def test_a_history_that_comes_back_as_it_was_finds_its_kv(owners: TwoOwners) -> None:
    """No other replica has run a turn meanwhile, so the KV that was not freed is still right."""
    await owners.say(owners.rigs["a"], [1, 2, 3])
    owners.move_to("b")
    rig = owners.move_to("a")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rig.engine, "close_session", failing(SessionBusy("in use")))
        assert await owners.say(rig, [4]) == 10


async def test_what_was_asked_of_the_engine_is_done_though_nobody_waits_any_more(
    owners: TwoOwners, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = owners.rigs["a"]
    await owners.say(rig, [1, 2, 3])
    monkeypatch.setattr(engine_answers, "ENGINE_TIMEOUT_S", 0.05)
    rig.runner.hold()
    other = asyncio.create_task(rig.run(call([9], max_new_tokens=2)))
    await rig.runner.held()
    await rig.host.release("s")
    rig.runner.go_on()
    await other
    assert await asyncio.wrap_future(rig.engine.session_kv_tokens()) == {}
