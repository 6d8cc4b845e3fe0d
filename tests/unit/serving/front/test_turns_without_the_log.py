"""While the session log is away, calls that need it wait. A finished turn is reported as the log has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Failover]:
    async with running_failover(tmp_path) as failover:
        yield failover
        await failover.settled()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.005)
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)


async def waits(task: asyncio.Task[TurnEvent] | asyncio.Task[str]) -> None:
    await asyncio.wait([task], timeout=SHORT_S)
    assert not task.done()


async def test_a_turn_whose_session_must_be_loaded_waits_for_the_log(served: Failover) -> None:
    served.open_session("s")
    served.controller.log.away = True
    turn = asyncio.create_task(served.turn(call(PROMPT, "s")))
    await waits(turn)
    served.controller.log.away = False
    assert list((await turn).token_ids) == WHOLE
    assert served.committed("s") == (1, len(PROMPT) + LENGTH)


async def test_an_open_waits_for_the_log(served: Failover) -> None:
    served.open_session("other")
    served.controller.log.away = True
    opening = asyncio.create_task(served.owners.open_session("s", "", None, None))
    await waits(opening)
    served.controller.log.away = False
    assert await opening == "s"


@pytest.mark.parametrize("tree", [False, True])
async def test_an_open_without_an_id_opens_one_session_though_its_answer_is_lost(
    served: Failover, tree: bool
) -> None:
    """The next try used to draw another id. The first session stayed, and counted for its tenant."""
    served.open_session("other")
    served.controller.lost_replies["open_session"] = [NoAnswer("lost")] * 2
    key = await served.owners.open_session(None, "acme", None, None, tree=tree)
    assert [entry.session_id for entry in served.cluster.sessions("acme")] == [key]


async def test_a_fork_waits_for_the_log(served: Failover) -> None:
    served.open_session("s")
    await served.turn(call(PROMPT, "s"))

    class Pinned:
        """Carries out the one call that is made to an owner."""

        async def call(self, replica_id: str, call: ForkSession) -> object:
            assert replica_id == "a"
            try:
                return await served.rigs[0].host.fork(call.parent_id, call.epoch, call.order)
            except StoreError as error:
                raise ServiceError(error_info(error)) from error

    served.owners._replicas = Pinned()  # type: ignore[assignment]
    served.controller.log.away = True
    order = ForkOrder("child", "key")
    forking = asyncio.create_task(served.owners.ask("s", lambda epoch: ForkSession("s", epoch, order)))
    await waits(forking)
    served.controller.log.away = False
    assert (await forking).tokens == len(PROMPT) + LENGTH


async def test_a_turn_that_needs_nothing_of_the_log_ends_with_its_return(served: Failover) -> None:
    served.open_session("s")
    await served.turn(call(PROMPT, "s"))
    served.controller.log.away = True
    async with aclosing(served.events(call([8], "s"))) as events:
        first = await anext(events)
        assert first.error is None
        served.controller.log.away = False
        *_, last = [event async for event in events]
    assert last.finish is not None
    assert served.committed("s") == (2, len(PROMPT) + LENGTH + 1 + LENGTH)
    assert failovers(served.metrics) == 0, "no owner was lost"


@pytest.mark.parametrize("failure", [StoreError("away"), NoAnswer("frozen")])
async def test_past_its_time_a_call_that_waited_ends_in_a_typed_error(
    tmp_path: Path, failure: StoreError
) -> None:
    async with running_failover(tmp_path, failover_timeout_s=SHORT_S) as served:
        served.open_session("s")
        for method in ("load_session", "open_session"):
            served.controller.failures[method] = [failure] * 1000
        with pytest.raises(ServiceError) as caught:
            await served.turn(call(PROMPT, "s"))
        assert (caught.value.info.status, caught.value.info.code) == (503, failure.code)
        with pytest.raises(ServiceError) as caught:
            await served.owners.open_session("t", "", None, None)
        assert (caught.value.info.status, caught.value.info.code) == (503, failure.code)


@pytest.mark.parametrize("in_log", [False, True])
async def test_a_session_that_moves_while_its_turn_is_pending(served: Failover, in_log: bool) -> None:
    """The replica of the turn only seemed dead. If the log has the turn, the next owner answers from the log. If not,
    it goes on after what was sent. Either way there is one turn."""
    served.open_session("s")
    a, b = served.rigs
    await served.turn(call([1], "s"))
    failures = [NoAnswer("no route")] * 100_000
    controller = served.controller
    (controller.lost_replies if in_log else controller.failures)["commit_turn"] = failures
    turn = asyncio.create_task(served.turn(call([9, 9], "s")))
    await a.pending_commits(1)
    async with asyncio.timeout(20):
        while a.figure("kedge_commit_retries_total") < 1:
            await asyncio.sleep(0.001)
    served.cluster.report_unreachable("a", True)
    assert served.cluster.resolve("s", False, "").replica_id == "b"
    failures.clear()
    last = await turn
    assert last.finish is not None
    history = [1, *null_generate([1], LENGTH, VOCAB_SIZE), 9, 9]
    assert list(last.token_ids) == null_generate(history, LENGTH, VOCAB_SIZE)
    assert served.committed("s") == (2, len(history) + LENGTH)
    assert b.figure("kedge_turns_total", outcome="replayed" if in_log else "committed") == 1
    assert a.sessions.epoch("s") is None
    assert a.figure("kedge_turns_total", outcome="stale") == 1
