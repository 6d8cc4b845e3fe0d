"""Rewinds and notes: turns without tokens, committed like others."""

from __future__ import annotations

import asyncio

import pytest

from controllers.errors import InvalidRewind, TurnDiffers, TurnInFlight
from controllers.records import ForkOrder
from serving.wire.calls import KeepNote, RewindSession
from serving.wire.transcripts import transcript_of
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, tokens_of


async def test_rewind(rig: Rig) -> None:
    epoch = rig.open_session("s")
    history = [1, 2, 3, *tokens_of(await rig.run(call([1, 2, 3], "s"), epoch))]
    await rig.empty_turns.rewind(RewindSession("s", epoch, 5))
    events = await rig.run(call([4], "s"), epoch)
    assert tokens_of(events) == null_generate([*history[:5], 4], 8, VOCAB_SIZE)
    assert events[-1].prompt_tokens == 6
    with pytest.raises(InvalidRewind):
        await rig.empty_turns.rewind(RewindSession("s", epoch, 50))
    events = await rig.run(call([8], "s"), epoch)
    assert events[-1].prompt_tokens == 6 + 8 + 1


async def test_a_note_is_a_turn_that_says_nothing(rig: Rig) -> None:
    epoch = rig.open_session("s")
    await rig.empty_turns.keep_note(KeepNote("s", epoch, b"first", "k0", 0))
    history = [1, 2, *tokens_of(await rig.run(call([1, 2], "s"), epoch))]
    for _ in range(2):
        await rig.empty_turns.keep_note(KeepNote("s", epoch, b"second", "k2", 2))
    with pytest.raises(TurnDiffers):
        await rig.empty_turns.keep_note(KeepNote("s", epoch, b"third", "k3", 2))
    assert rig.sessions.committed_len("s") == len(history)
    assert (await rig.run(call([3], "s"), epoch))[-1].prompt_tokens == len(history) + 1
    notes = [transcript_of(note) for note in rig.controller.cluster.notes.page("s", "")]
    assert [note.said.note for note in notes] == [b"first", b"", b"second", b""]
    assert (notes[2].start_len, notes[2].end_len) == (len(history), len(history))


async def test_a_rewind_that_is_repeated_is_one_rewind(rig: Rig) -> None:
    """Front ends repeat a call whose answer was lost. The second one cut off what was committed between the two."""
    epoch = rig.open_session("s")
    await rig.run(call([1, 2], "s"), epoch)
    order = RewindSession("s", epoch, 3, "k")
    rig.controller.gate.clear()
    both = [asyncio.create_task(rig.empty_turns.rewind(order)) for _ in range(2)]
    await rig.asked_controller(1)
    rig.controller.gate.set()
    await asyncio.gather(*both)
    assert (rig.sessions.committed_len("s"), rig.controller.cluster.session("s").turns) == (3, 2)
    await rig.run(call([5], "s"), epoch)
    committed = rig.sessions.committed_len("s")
    await rig.empty_turns.rewind(order)
    assert (rig.sessions.committed_len("s"), rig.controller.cluster.session("s").turns) == (committed, 3)


async def test_no_note_is_kept_while_a_turn_runs(rig: Rig) -> None:
    epoch = rig.open_session("s")
    rig.runner.hold()
    task = asyncio.create_task(rig.run(call([1], "s"), epoch))
    await rig.begun()
    with pytest.raises(TurnInFlight):
        await rig.empty_turns.keep_note(KeepNote("s", epoch, b"n", "k", None))
    rig.runner.go_on()
    await task


async def test_a_rewind_waits_for_a_fork(rig: Rig) -> None:
    """It used to be refused with 409 turn_in_flight, unlike a turn, a move or another fork."""
    epoch = rig.open_session("s")
    await rig.run(call([1, 2], "s"), epoch)
    rig.controller.gate.clear()
    fork = asyncio.create_task(rig.host.fork("s", epoch, ForkOrder("child", "k")))
    await rig.in_turn("s")
    rewind = asyncio.create_task(rig.empty_turns.rewind(RewindSession("s", epoch, 3, "k")))
    await asyncio.sleep(0)
    rig.controller.gate.set()
    assert (await fork).tokens == 10
    await rewind
    assert rig.sessions.committed_len("s") == 3
