"""Turns with adapters of the model: a session may change its adapter, and no KV of one serves another."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils import chat_template_utils

from controllers.records import ForkOrder
from engine.api import SamplingParams
from serving.front.conversations import Conversations
from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt, HistoryMode, SessionTurn, TurnCall, TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, running_rig, tokens_of
from tests.unit.serving.small_tokenizer import CHATML, byte_level_tokenizer


def generated(history: list[int]) -> list[int]:
    return null_generate(history, 8, VOCAB_SIZE)


def cached(events: list[TurnEvent]) -> int:
    assert events[-1].error is None, events[-1].error
    return events[-1].cached_tokens


async def test_a_session_keeps_its_kv_while_its_turns_name_the_same_adapter(rig: Rig) -> None:
    """The null runner refuses to read another adapter's KV."""
    epoch = rig.open_session("s")
    history: list[int] = []
    found = []
    for adapter in ("a", "a", "b", "b", "", "", "a"):
        events = await rig.run(call([7], "s", adapter=adapter), epoch)
        history.append(7)
        assert tokens_of(events) == generated(history)
        history += tokens_of(events)
        found.append(cached(events))
    assert found == [0, 8, 0, 26, 0, 44, 0]
    await rig.host.close("s", epoch)
    await rig.books_are_empty()


async def test_a_fork_goes_on_from_its_parent_s_kv_with_its_parent_s_adapter(rig: Rig) -> None:
    epoch = rig.open_session("s")
    await rig.run(call([7], "s", adapter="a"), epoch)
    for child, adapter, shared in (("same", "a", True), ("other", "b", False), ("none", "", False)):
        await rig.host.fork("s", epoch, ForkOrder(child, f"key of {child}", None, None))
        child_epoch = rig.controller.cluster.resolve(child, False, "").epoch
        assert bool(cached(await rig.run(call([9], child, adapter=adapter), child_epoch))) == shared


async def test_a_session_goes_on_with_its_adapter_at_another_replica(rig: Rig, tmp_path: Path) -> None:
    epoch = rig.open_session("s")
    first = tokens_of(await rig.run(call([7], "s", adapter="a"), epoch))
    async with running_rig(tmp_path, controller=rig.controller, replica_id="b") as heir:
        cluster = rig.controller.cluster
        cluster.report_unreachable(rig.replica_id, True)
        cluster.register_replica(heir.host.status())
        epoch = cluster.resolve("s", False, "").epoch
        found = [await heir.run(call([9], "s", adapter="a"), epoch) for _ in range(2)]
    assert tokens_of(found[0]) == generated([7, *first, 9])
    assert [cached(events) > 0 for events in found] == [False, True]


async def test_an_adapter_that_this_replica_lacks_leaves_no_trace(rig: Rig) -> None:
    """A front end may have newer settings."""
    epoch = rig.open_session("s")
    for session, at in (("s", epoch), (None, None)):
        (event,) = await rig.run(call([7], session, adapter="new"), at)
        assert event.error is not None
        assert (event.error.status, event.error.code) == (503, "adapter_not_loaded")
        assert event.error.param == "model"
        assert event.error.retry_after_s is not None
    assert len(rig.unnamed) == 0
    assert cached(await rig.run(call([7], "s", adapter="a"), epoch)) == 0


async def test_a_key_is_of_a_turn_with_its_adapter(rig: Rig) -> None:
    epoch = rig.open_session("s")
    first = await rig.run(call([7], "s", key="k", adapter="a"), epoch)
    assert tokens_of(await rig.run(call([7], "s", key="k", adapter="a"), epoch)) == tokens_of(first)
    (event,) = await rig.run(call([7], "s", key="k"), epoch)
    assert event.error is not None
    assert event.error.code == "idempotency_conflict"


class Calendar:
    """Stands in for `datetime` where templates look for the date."""

    day = 1

    @classmethod
    def now(cls) -> datetime:
        return datetime(2026, 11, cls.day)  # noqa: DTZ001


@pytest.mark.parametrize("mode", ["full", "auto"])
async def test_a_session_changes_its_adapter_on_a_later_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: HistoryMode
) -> None:
    """Its template has the date, so that only a checkpoint leads back to its history. None was recognized after a
    change: the turn was refused as one of another conversation."""
    monkeypatch.setattr(chat_template_utils, "datetime", Calendar)
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    text = TextProcessor(byte_level_tokenizer(template), vocab_size=VOCAB_SIZE, max_context_len=512)
    front_end, greedy = Conversations(100), SamplingParams(temperature=0.0)
    async with running_rig(tmp_path, text=text) as rig:
        epoch = rig.open_session("s")
        messages: list[dict[str, str]] = []
        for day, adapter in enumerate(("", "a", "b", ""), 1):
            monkeypatch.setattr(Calendar, "day", day)
            messages.append({"role": "user", "content": f"question {day}"})
            prompt, session = ChatPrompt(tuple(messages)), SessionTurn("s", mode=mode)
            turn = TurnCall("r", prompt, greedy, max_new_tokens=3, session=session, adapter=adapter)
            events = await rig.run(front_end.recognized(turn), epoch)
            assert events[-1].error is None, events[-1].error
            messages.append({"role": "assistant", "content": "".join(event.text for event in events)})


@pytest.mark.parametrize("salt", ["", "salt"])
async def test_prefixes_are_shared_within_a_tenant_s_adapter(rig: Rig, salt: str) -> None:
    prompt = list(range(1, 30))
    for tenant in ("acme", "other"):
        for adapter in ("", "a", "b"):
            calls = [call(prompt, tenant=tenant, adapter=adapter, cache_salt=salt) for _ in range(2)]
            assert [cached(await rig.run(each)) for each in calls] == [0, 28]
