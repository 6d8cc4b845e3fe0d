"""A finished turn waits, with its KV, while the session log is away. It is committed once, or not reported as
committed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controllers.errors import IdempotencyConflict, NoAnswer, SessionNotFound, StaleEpoch, StoreError
from serving.replica import turn_commits
from serving.wire.turns import TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, running_rig, tokens_of

SHORT_S = 0.1
IMPATIENT = {"controller": {"commit_patience_s": SHORT_S}}
LONG_S = 3600.0


async def held(rig: Rig, session_id: str) -> int:
    """Opens a session and loads it on the replica. Returns its epoch."""
    epoch = rig.open_session(session_id)
    await rig.host.hold(session_id, epoch)
    return epoch


def turns_in_log(rig: Rig, session_id: str = "s") -> tuple[int, int]:
    """The session's numbers of turns and of tokens in the log."""
    record = rig.controller.log.load(session_id)
    return record.turns, record.num_tokens


def told(rig: Rig, new: list[int], epoch: int, heard: list[int], **options: str) -> asyncio.Task[TurnEvent]:
    """Runs a turn of session "s" in a task. Its tokens go to `heard` as they come. The task returns the last event."""

    async def listen() -> TurnEvent:
        async for event in rig.events(call(new, "s", **options), epoch):
            heard.extend(event.token_ids)
        return event

    return asyncio.create_task(listen())


async def test_a_finished_turn_waits_for_the_log_and_keeps_its_kv(rig: Rig) -> None:
    """Such a turn used to end in store_unavailable after eight streamed tokens, and the session's KV was dropped."""
    epoch = rig.open_session("s")
    history = [1, *tokens_of(await rig.run(call([1], "s"), epoch))]
    rig.controller.log.away = True
    heard: list[int] = []
    turn = told(rig, [2], epoch, heard)
    await rig.pending_commits(1)
    async with asyncio.timeout(20):
        while len(heard) < 8 or rig.figure("kedge_commits_failing") != 1:
            await asyncio.sleep(0.001)
    busy = (await rig.run(call([3], "s"), epoch))[-1].error
    assert busy is not None
    assert (busy.status, busy.code) == (409, "turn_in_flight")
    assert len(tokens_of(await rig.run(call([7, 8])))) == 8, "others go on"
    rig.controller.log.away = False
    final = await turn
    assert final.finish is not None
    assert final.finish.reason == "length"
    history += [2, *heard]
    assert turns_in_log(rig) == (2, len(history))
    events = await rig.run(call([3], "s"), epoch)
    assert tokens_of(events) == null_generate([*history, 3], 8, VOCAB_SIZE)
    assert events[-1].cached_tokens in (len(history), len(history) - 1), "nothing is computed again"
    assert rig.figure("kedge_turns_total", outcome="committed") == 4
    assert rig.figure("kedge_turns_total", outcome="store_failed") == 0
    assert rig.figure("kedge_commit_retries_total") > 0
    await rig.pending_commits(0)
    assert rig.figure("kedge_commits_failing") == 0
    await rig.host.close("s", 1)
    await rig.books_are_empty()


async def test_a_controller_that_is_frozen_is_waited_for(rig: Rig) -> None:
    epoch = rig.open_session("s")
    history = [1, *tokens_of(await rig.run(call([1], "s"), epoch))]
    rig.controller.gate.clear()
    turn = told(rig, [2], epoch, history_of_turn := [])
    await rig.pending_commits(1)
    assert rig.figure("kedge_commits_failing") == 0, "it waits, and nothing has failed"
    rig.controller.gate.set()
    assert (await turn).finish is not None
    history += [2, *history_of_turn]
    events = await rig.run(call([3], "s"), epoch)
    assert events[-1].cached_tokens in (len(history), len(history) - 1)


@pytest.mark.parametrize("failure", [StoreError("no reply in time"), NoAnswer("died"), RuntimeError("boom")])
async def test_a_commit_whose_answer_was_lost_is_made_once(rig: Rig, failure: Exception) -> None:
    epoch = rig.open_session("s")
    history = [1, *tokens_of(await rig.run(call([1], "s"), epoch))]
    rig.controller.lost_replies["commit_turn"] = [failure, failure]
    events = await rig.run(call([2], "s"), epoch)
    assert events[-1].finish is not None
    history += [2, *tokens_of(events)]
    assert turns_in_log(rig) == (2, len(history))
    events = await rig.run(call([3], "s"), epoch)
    assert tokens_of(events) == null_generate([*history, 3], 8, VOCAB_SIZE)
    assert events[-1].cached_tokens in (len(history), len(history) - 1)


@pytest.mark.parametrize(
    "refusal", [StaleEpoch("moved"), SessionNotFound("closed"), IdempotencyConflict("another turn's")]
)
async def test_a_refusal_is_an_answer(rig: Rig, refusal: Exception) -> None:
    """The refused commit is not tried again, and nothing of the turn stays."""
    epoch = rig.open_session("s")
    rig.controller.failures["commit_turn"] = [refusal]
    failed = (await rig.run(call([2], "s"), epoch))[-1].error
    assert failed is not None
    assert failed.code == getattr(refusal, "code", None)
    assert not rig.sessions.knows("s", epoch)
    assert turns_in_log(rig) == (0, 0)
    assert rig.figure("kedge_commit_retries_total") == 0
    assert rig.figure("kedge_turns_total", outcome="stale") == 1
    await rig.books_are_empty()


async def test_a_retry_under_the_same_key_waits_for_the_commit(rig: Rig) -> None:
    epoch = await held(rig, "s")
    rig.controller.log.away = True
    first = asyncio.create_task(rig.run(call([2], "s", key="k"), epoch))
    await rig.pending_commits(1)
    again = asyncio.create_task(rig.run(call([2], "s", key="k"), epoch))
    await asyncio.wait([again], timeout=SHORT_S)
    assert not again.done(), "nobody knows the answer yet"
    rig.controller.log.away = False
    assert tokens_of(await first) == tokens_of(await again) == null_generate([2], 8, VOCAB_SIZE)
    assert (await again)[-1].replayed
    assert turns_in_log(rig) == (1, 9)
    other = (await rig.run(call([3], "s", key="k"), epoch))[-1].error
    assert other is not None
    assert other.code == "idempotency_conflict"


async def test_a_retry_after_a_client_that_left_is_answered_from_its_turn(rig: Rig) -> None:
    epoch = await held(rig, "s")
    rig.controller.log.away = True
    left = told(rig, [2], epoch, [], key="k")
    await rig.pending_commits(1)
    left.cancel()
    await asyncio.wait([left])
    again = asyncio.create_task(rig.run(call([2], "s", key="k"), epoch))
    await rig.pending_commits(1)
    rig.controller.log.away = False
    assert tokens_of(await again) == null_generate([2], 8, VOCAB_SIZE)
    assert (await again)[-1].replayed
    assert turns_in_log(rig) == (1, 9)


async def test_a_turn_is_committed_though_its_client_leaves(rig: Rig) -> None:
    """The log may already have the turn. If the replica took it back, the replica and the log would disagree."""
    epoch = await held(rig, "s")
    rig.controller.log.away = True
    left = told(rig, [2], epoch, [])
    await rig.pending_commits(1)
    left.cancel()
    await asyncio.wait([left])
    await rig.pending_commits(1)
    rig.controller.log.away = False
    await rig.settled()
    assert turns_in_log(rig) == (1, 9)
    history = [2, *null_generate([2], 8, VOCAB_SIZE)]
    events = await rig.run(call([3], "s"), epoch)
    assert tokens_of(events) == null_generate([*history, 3], 8, VOCAB_SIZE)
    assert events[-1].cached_tokens in (9, 8)


async def test_an_abort_comes_too_late_for_a_finished_turn(rig: Rig) -> None:
    epoch = await held(rig, "s")
    rig.controller.log.away = True
    turn = told(rig, [2], epoch, heard := [], request_id="mine")
    await rig.pending_commits(1)
    rig.turns.abort("mine", "")
    rig.controller.log.away = False
    final = (await turn).finish
    assert final is not None
    assert final.reason == "length"
    assert turns_in_log(rig) == (1, 1 + len(heard))


async def test_a_close_waits_for_a_pending_commit(rig: Rig) -> None:
    epoch = await held(rig, "s")
    rig.controller.log.away = True
    turn = told(rig, [2], epoch, [])
    await rig.pending_commits(1)
    with pytest.raises(StoreError):
        await rig.host.close("s", 1)  # if this succeeded, the close could be lost
    rig.controller.log.away = False
    assert (await turn).finish is not None
    await rig.settled()
    assert rig.controller.cluster.sessions() == []
    await rig.books_are_empty()


@pytest.mark.parametrize("in_log", [False, True])
async def test_patience_ends_in_a_typed_error_and_the_key_finds_out(tmp_path: Path, in_log: bool) -> None:
    async with running_rig(tmp_path, settings=IMPATIENT) as rig:
        epoch = rig.open_session("s")
        history = [1, *tokens_of(await rig.run(call([1], "s"), epoch))]
        failures = [StoreError("Redis is away")] * 1000
        (rig.controller.lost_replies if in_log else rig.controller.failures)["commit_turn"] = failures
        failed = (await rig.run(call([2], "s", key="k"), epoch))[-1].error
        assert failed is not None
        assert (failed.status, failed.code) == (503, "store_unavailable")
        assert "not committed within 0.1 s (Redis is away)" in failed.message
        assert "same idempotency key" in failed.message
        assert rig.figure("kedge_turns_total", outcome="store_failed") == 1
        assert not rig.sessions.knows("s", epoch), "only the log knows"
        failures.clear()
        assert turns_in_log(rig) == ((2, len(history) + 9) if in_log else (1, len(history)))
        again = await rig.run(call([2], "s", key="k"), epoch)
        assert again[-1].replayed == in_log
        history += [2, *tokens_of(again)]
        assert turns_in_log(rig) == (2, len(history))
        events = await rig.run(call([3], "s"), epoch)
        assert tokens_of(events) == null_generate([*history, 3], 8, VOCAB_SIZE)
        await rig.host.close("s", 1)
        await rig.books_are_empty()


async def test_patience_ends_though_nothing_answers(tmp_path: Path) -> None:
    async with running_rig(tmp_path, settings=IMPATIENT) as rig:
        epoch = rig.open_session("s")
        await rig.run(call([1], "s"), epoch)
        rig.controller.gate.clear()
        failed = (await rig.run(call([2], "s"), epoch))[-1].error
        assert failed is not None
        assert failed.code == "store_unavailable"
        assert "(no answer)" in failed.message


async def test_one_commit_that_succeeds_wakes_all_that_wait(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_commits, "FIRST_PAUSE_S", LONG_S)
    monkeypatch.setattr(turn_commits, "LONGEST_PAUSE_S", LONG_S)
    epochs = {name: await held(rig, name) for name in "abc"}
    rig.controller.log.away = True
    turns = [asyncio.create_task(rig.run(call([2], name), epochs[name])) for name in "ab"]
    await rig.pending_commits(2)
    rig.controller.log.away = False
    assert (await rig.run(call([2], "c"), epochs["c"]))[-1].finish is not None
    async with asyncio.timeout(20):
        assert all(events[-1].finish is not None for events in await asyncio.gather(*turns))


async def test_a_failure_that_is_not_the_logs_holds_nobody_else_up(rig: Rig) -> None:
    epochs = {name: rig.open_session(name) for name in "ab"}
    rig.controller.failures["commit_turn"] = [RuntimeError("boom")] * 3
    ends = await asyncio.gather(*(rig.run(call([2], name), epochs[name]) for name in "ab"))
    assert all(events[-1].finish is not None for events in ends)
