"""Known session faults of other servers, tried on one replica: turns that leave, overlap, wait or end after a close.
Each test fails if the code that prevents the fault is taken out. The numbers are those of SGLang's issues and pull
requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from serving.wire.turns import TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import ENDS_AT_ONCE, VOCAB_SIZE, WAIT_S, Rig, call, running_rig, tokens_of


class Aborts:
    """Tells when the engine has been asked to abort a request."""

    def __init__(self, rig: Rig) -> None:
        self._abort = rig.engine.abort
        self._asked = asyncio.Event()
        rig.engine.abort = self._heard  # type: ignore[method-assign]

    async def asked(self) -> None:
        await asyncio.wait_for(self._asked.wait(), WAIT_S)

    def _heard(self, request_id: str) -> None:
        self._abort(request_id)
        self._asked.set()


async def first_turn(rig: Rig, session_id: str = "s") -> tuple[int, list[int]]:
    """Opens the session and runs a turn. Returns its epoch and its history."""
    epoch = rig.open_session(session_id)
    return epoch, [1, 2, *tokens_of(await rig.run(call([1, 2], session_id), epoch))]


async def all_wait() -> None:
    """Returns once every task waits for the engine."""
    for _ in range(100):
        await asyncio.sleep(0)


def error_code(events: list[TurnEvent]) -> str | None:
    return None if events[-1].error is None else events[-1].error.code


# A client leaves and its next turn comes at once (36475, 36333).


@pytest.mark.parametrize("key", [None, "again"])
async def test_the_next_turn_waits_while_the_one_that_its_client_left_is_ended(
    rig: Rig, key: str | None
) -> None:
    """The engine is in a step and cannot end the left turn yet. In the end nothing of that turn is in the session."""
    epoch, history = await first_turn(rig)
    aborts = Aborts(rig)
    rig.runner.hold()
    left = asyncio.create_task(rig.run(call([5, 6], "s", max_new_tokens=300, key=key), epoch))
    await rig.begun()
    left.cancel()
    await aborts.asked()
    coming = asyncio.create_task(rig.run(call([7], "s", key=key), epoch))
    also_coming = asyncio.create_task(rig.run(call([8], "s"), epoch))
    await all_wait()
    assert not coming.done()
    assert not also_coming.done()
    rig.runner.go_on()
    answers = [await asyncio.wait_for(task, WAIT_S) for task in (coming, also_coming)]
    assert tokens_of(answers[0]) == null_generate([*history, 7], 8, VOCAB_SIZE)
    assert error_code(answers[1]) == "turn_in_flight", "one at a time, as ever"
    await rig.host.close("s", 1)
    await rig.books_are_empty()


async def test_who_leaves_while_waiting_for_a_turn_to_end_leaves_nothing(rig: Rig) -> None:
    epoch, history = await first_turn(rig)
    aborts = Aborts(rig)
    rig.runner.hold()
    left = asyncio.create_task(rig.run(call([5, 6], "s", max_new_tokens=300), epoch))
    await rig.begun()
    left.cancel()
    await aborts.asked()
    coming = asyncio.create_task(rig.run(call([7], "s"), epoch))
    await all_wait()
    coming.cancel()
    await asyncio.wait([coming])
    rig.runner.go_on()
    await rig.settled()
    assert tokens_of(await rig.run(call([8], "s"), epoch)) == null_generate([*history, 8], 8, VOCAB_SIZE)
    await rig.host.close("s", 1)
    await rig.books_are_empty()


# A refused overlapping turn clears the in-turn mark of the running turn (36503).


async def test_turns_that_overlap_are_refused_for_as_long_as_the_first_one_lasts(rig: Rig) -> None:
    epoch, history = await first_turn(rig)
    rig.runner.hold()
    first = asyncio.create_task(rig.run(call([5], "s", max_new_tokens=30), epoch))
    await rig.begun()
    for number in range(4):
        assert error_code(await rig.run(call([6], "s", request_id=f"r{number}"), epoch)) == "turn_in_flight"
        assert [status.in_turn for status in rig.sessions.snapshot()] == [True]
        assert rig.turns.num_live == 1
    rig.runner.go_on()
    history += [5, *tokens_of(await first)]
    assert history[-30:] == null_generate(history[:-30], 30, VOCAB_SIZE)
    assert tokens_of(await rig.run(call([7], "s"), epoch)) == null_generate([*history, 7], 8, VOCAB_SIZE)


# A turn that is aborted, left or timed out in the queue makes its session unusable (31765, 31767).


@pytest.mark.parametrize("end", ["aborted", "left", "timed out", "closed"])
async def test_a_session_whose_turn_ended_in_the_queue_goes_on(tmp_path: Path, end: str) -> None:
    """Another session's turn is in a step meanwhile."""
    async with running_rig(tmp_path, settings=ENDS_AT_ONCE if end == "timed out" else None) as rig:
        epoch, history = await first_turn(rig)
        other_epoch = rig.open_session("other")
        rig.runner.hold()
        other = asyncio.create_task(rig.run(call([9], "other", max_new_tokens=20), other_epoch))
        await rig.begun()
        queued = asyncio.create_task(rig.run(call([5], "s", request_id="queued"), epoch))
        await rig.begun(2)
        if end == "aborted":
            assert rig.turns.abort("queued", "") == 1
        elif end == "left":
            queued.cancel()
        elif end == "timed out":
            await rig.host.expire_idle()
        else:
            assert await rig.host.close("s", 1)
        rig.runner.go_on()
        await asyncio.wait([queued, other], timeout=WAIT_S)
        assert tokens_of(other.result()) == null_generate([9], 20, VOCAB_SIZE)
        await rig.settled()
        if end == "closed":
            assert [status.session_id for status in rig.sessions.snapshot()] == ["other"]
        else:
            if end == "timed out":
                history += [5, *tokens_of(queued.result())]
                assert history[-8:] == null_generate(history[:-8], 8, VOCAB_SIZE), (
                    "a turn in the queue is no idleness"
                )
            events = await rig.run(call([7], "s"), epoch)
            assert events[-1].prompt_tokens == len(history) + 1
            assert tokens_of(events) == null_generate([*history, 7], 8, VOCAB_SIZE)
            await rig.host.close("s", 1)
        await rig.host.close("other", 1)
        await rig.books_are_empty()


# A turn that ends after its session was closed assigns pages, or the log, to the session again.


@pytest.mark.parametrize("end", ["finished", "aborted", "left"])
async def test_nothing_is_a_session_s_after_it_was_closed_however_its_turn_ends(rig: Rig, end: str) -> None:
    epoch, history = await first_turn(rig)
    rig.runner.hold()
    turn = asyncio.create_task(rig.run(call([5], "s", max_new_tokens=30, request_id="last"), epoch))
    await rig.begun()
    assert await rig.host.close("s", 1)
    if end == "aborted":
        rig.turns.abort("last", "")
    elif end == "left":
        turn.cancel()
    rig.runner.go_on()
    await asyncio.wait([turn], timeout=WAIT_S)
    await rig.settled()
    assert rig.sessions.snapshot() == []
    assert rig.controller.cluster.sessions() == []
    await rig.books_are_empty()
    again = rig.open_session("s")
    assert again > epoch
    events = await rig.run(call([7], "s"), again)
    assert tokens_of(events) == null_generate([7], 8, VOCAB_SIZE), "nothing of the closed one"
    assert len(history) == 10
