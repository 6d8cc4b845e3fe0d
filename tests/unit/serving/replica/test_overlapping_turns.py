"""A client leaves a turn and sends the next one at once. The next turn may reach the replica before it hears that the
client has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from serving.replica import overlaps
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, running_rig, tokens_of

FIRST = [1, 2, 3]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path) as rig:
        yield rig


async def in_flight(rig: Rig) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
    """A turn that its client still reads, and the next turn of the same session, which has already come."""
    epoch = rig.open_session("s")
    rig.runner.hold()
    former = asyncio.create_task(rig.run(call(FIRST, "s", max_new_tokens=20), epoch))
    await rig.begun()
    following = asyncio.create_task(rig.run(call([4], "s"), epoch))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not following.done()
    return former, following


async def test_the_next_turn_waits_for_the_end_of_one_whose_client_leaves(rig: Rig) -> None:
    """The next turn used to be refused with 409 turn_in_flight."""
    former, following = await in_flight(rig)
    former.cancel()
    rig.runner.go_on()
    assert tokens_of(await following) == null_generate([4], 8, VOCAB_SIZE), "the turn left no trace"
    await rig.settled()


async def test_it_waits_also_for_a_long_step(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn before ends with the engine's step. The next one used to be told of it only then: too late."""
    monkeypatch.setattr(overlaps, "OVERLAP_PATIENCE_S", 0.1)
    former, following = await in_flight(rig)
    former.cancel()
    await asyncio.wait([following], timeout=0.3)
    assert not following.done()
    rig.runner.go_on()
    assert tokens_of(await following) == null_generate([4], 8, VOCAB_SIZE)
    await rig.settled()


async def test_a_turn_beside_one_that_is_read_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "OVERLAP_PATIENCE_S", 0.1)
    former, following = await in_flight(rig)
    error = (await following)[-1].error
    assert error is not None
    assert error.code == "turn_in_flight"
    rig.runner.go_on()
    assert tokens_of(await former) == null_generate(FIRST, 20, VOCAB_SIZE)


async def test_a_turn_that_can_run_elsewhere_is_refused_soon(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlaps, "OVERLAP_PATIENCE_S", 600.0)
    former, patient = await in_flight(rig)
    asked = call([4], "s")
    assert asked.session is not None
    asked = replace(asked, session=replace(asked.session, fallback="elsewhere"))
    async with asyncio.timeout(30):
        error = (await rig.run(asked, 1))[-1].error
    assert error is not None
    assert error.code == "turn_in_flight"
    assert not patient.done()
    former.cancel()
    rig.runner.go_on()
    await patient


async def test_it_is_refused_also_if_that_one_is_answered_meanwhile(rig: Rig) -> None:
    """The client sent the two turns side by side. Chance must not decide which of them comes first."""
    former, following = await in_flight(rig)
    rig.runner.go_on()
    assert tokens_of(await former) == null_generate(FIRST, 20, VOCAB_SIZE)
    error = (await following)[-1].error
    assert error is not None
    assert error.code == "turn_in_flight"


async def test_the_next_turn_follows_one_that_is_committed_though_its_client_has_left(rig: Rig) -> None:
    """The client does not wait for the last event, and the commit takes a moment."""
    epoch = rig.open_session("s")
    await rig.run(call(FIRST, "s"), epoch)
    rig.controller.log.away = True
    left = asyncio.create_task(rig.run(call([4], "s"), epoch))
    await rig.pending_commits(1)
    following = asyncio.create_task(rig.run(call([5], "s"), epoch))
    for _ in range(50):
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    rig.controller.log.away = False
    events = await following
    assert events[-1].finish is not None
    assert rig.sessions.snapshot()[0].turns == 3
    await rig.settled()


async def test_the_same_turn_beside_it_gets_its_answer(rig: Rig) -> None:
    """It used to be refused with 409 turn_in_flight when the first one was answered, though its answer was there."""
    epoch = rig.open_session("s")
    rig.runner.hold()
    asked = call(FIRST, "s", key="k")
    former = asyncio.create_task(rig.run(asked, epoch))
    await rig.begun()
    again = asyncio.create_task(rig.run(asked, epoch))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not again.done()
    rig.runner.go_on()
    assert tokens_of(await former) == null_generate(FIRST, 8, VOCAB_SIZE)
    (event,) = await again
    assert (event.replayed, list(event.token_ids)) == (True, null_generate(FIRST, 8, VOCAB_SIZE))
    assert rig.sessions.snapshot()[0].turns == 1
