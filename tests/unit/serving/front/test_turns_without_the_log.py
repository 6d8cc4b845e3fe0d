"""While the session log is away, calls that need it wait. A finished turn is reported as the log has it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from controllers.errors import NoAnswer, StoreError
from controllers.records import ForkOrder
from serving.front import session_owners
from serving.wire.calls import ForkSession
from serving.wire.errors import error_info
from serving.wire.turns import ServiceError, TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, failovers, running_failover
from tests.unit.serving.replica_rig import VOCAB_SIZE, call

SHORT_S = 0.1
LENGTH = 8
PROMPT = [5, 6, 7]
WHOLE = null_generate(PROMPT, LENGTH, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.005)
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)


async def waits(task: asyncio.Task[TurnEvent] | asyncio.Task[str]) -> None:
    await asyncio.wait([task], timeout=SHORT_S)
    assert not task.done()


async def test_a_turn_whose_session_must_be_loaded_waits_for_the_log(failover: Failover) -> None:
    failover.open_session("s")
    failover.controller.log.away = True
    turn = asyncio.create_task(failover.turn(call(PROMPT, "s")))
    await waits(turn)
    failover.controller.log.away = False
    assert list((await turn).token_ids) == WHOLE
    assert failover.committed("s") == (1, len(PROMPT) + LENGTH)


async def test_an_open_waits_for_the_log(failover: Failover) -> None:
    failover.open_session("other")
    failover.controller.log.away = True
    opening = asyncio.create_task(failover.owners.open_session("s", "", None, None))
    await waits(opening)
    failover.controller.log.away = False
    assert await opening == "s"


@pytest.mark.parametrize("tree", [False, True])
async def test_an_open_without_an_id_opens_one_session_though_its_answer_is_lost(
    failover: Failover, tree: bool
) -> None:
    """The next try used to draw another id. The first session stayed, and counted for its tenant."""
    failover.open_session("other")
    failover.controller.lost_replies["open_session"] = [NoAnswer("lost")] * 2
    key = await failover.owners.open_session(None, "acme", None, None, tree=tree)
    assert [entry.session_id for entry in failover.cluster.sessions("acme")] == [key]


async def test_a_fork_waits_for_the_log(failover: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    failover.open_session("s")
    await failover.turn(call(PROMPT, "s"))

    class Pinned:
        """Carries out the one call that is made to an owner."""

        async def call(self, replica_id: str, call: ForkSession) -> object:
            assert replica_id == "a"
            try:
                return await failover.rigs[0].host.fork(call.parent_id, call.epoch, call.order)
            except StoreError as error:
                raise ServiceError(error_info(error)) from error

    monkeypatch.setattr(failover.owners, "_replicas", Pinned())
    failover.controller.log.away = True
    order = ForkOrder("child", "key")
    forking = asyncio.create_task(failover.owners.ask("s", lambda epoch: ForkSession("s", epoch, order)))
    await waits(forking)
    failover.controller.log.away = False
    assert (await forking).tokens == len(PROMPT) + LENGTH


async def test_a_turn_that_needs_nothing_of_the_log_ends_with_its_return(failover: Failover) -> None:
    failover.open_session("s")
    await failover.turn(call(PROMPT, "s"))
    failover.controller.log.away = True
    async with aclosing(failover.events(call([8], "s"))) as events:
        first = await anext(events)
        assert first.error is None
        failover.controller.log.away = False
        *_, last = [event async for event in events]
    assert last.finish is not None
    assert failover.committed("s") == (2, len(PROMPT) + LENGTH + 1 + LENGTH)
    assert failovers(failover.metrics) == 0, "no owner was lost"


@pytest.mark.parametrize("failure", [StoreError("away"), NoAnswer("frozen")])
async def test_past_its_time_a_call_that_waited_ends_in_a_typed_error(
    tmp_path: Path, failure: StoreError
) -> None:
    async with running_failover(tmp_path, failover_timeout_s=SHORT_S) as failover:
        failover.open_session("s")
        for method in ("load_session", "open_session"):
            failover.controller.failures[method] = [failure] * 1000
        with pytest.raises(ServiceError) as caught:
            await failover.turn(call(PROMPT, "s"))
        assert (caught.value.info.status, caught.value.info.code) == (503, failure.code)
        with pytest.raises(ServiceError) as caught:
            await failover.owners.open_session("t", "", None, None)
        assert (caught.value.info.status, caught.value.info.code) == (503, failure.code)


@pytest.mark.parametrize("in_log", [False, True])
async def test_a_session_that_moves_while_its_turn_is_pending(failover: Failover, in_log: bool) -> None:
    """The replica of the turn only seemed dead. If the log has the turn, the next owner answers from the log. If not,
    it goes on after what was sent. Either way there is one turn."""
    failover.open_session("s")
    a, b = failover.rigs
    await failover.turn(call([1], "s"))
    failures = [NoAnswer("no route")] * 100_000
    controller = failover.controller
    (controller.lost_replies if in_log else controller.failures)["commit_turn"] = failures
    turn = asyncio.create_task(failover.turn(call([9, 9], "s")))
    await a.pending_commits(1)
    async with asyncio.timeout(20):
        while a.figure("kedge_commit_retries_total") < 1:
            await asyncio.sleep(0.001)
    failover.cluster.report_unreachable("a", True)
    assert failover.cluster.resolve("s", False, "").replica_id == "b"
    failures.clear()
    last = await turn
    assert last.finish is not None
    history = [1, *null_generate([1], LENGTH, VOCAB_SIZE), 9, 9]
    assert list(last.token_ids) == null_generate(history, LENGTH, VOCAB_SIZE)
    assert failover.committed("s") == (2, len(history) + LENGTH)
    assert b.figure("kedge_turns_total", outcome="replayed" if in_log else "committed") == 1
    assert a.sessions.epoch("s") is None
    assert a.figure("kedge_turns_total", outcome="stale") == 1
