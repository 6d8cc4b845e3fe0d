"""Turns with adapters of the model: a session may change its adapter, and no KV of one serves another."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path

import pytest
from msgspec.structs import replace
from transformers.utils import chat_template_utils

from controllers.records import ForkOrder
from engine.api import SamplingParams
from engine.engine import LocalEngine
from serving.front.known_places import KnownPlaces
from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt, HistoryMode, ResumedTurn, SessionTurn, TurnCall, TurnEvent
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.local_service import small_text
from tests.unit.serving.replica_rig import VOCAB_SIZE, Rig, call, running_rig, tokens_of
from tests.unit.serving.small_tokenizer import CHATML, byte_level_tokenizer

PAGE_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)


def generated(history: list[int]) -> list[int]:
    return null_generate(history, 8, VOCAB_SIZE)


def cached(events: list[TurnEvent]) -> int:
    assert events[-1].error is None, events[-1].error
    return events[-1].cached_tokens


def chat(*texts: str, adapter: str) -> TurnCall:
    """A turn of a conversation without a name: `texts` are questions and answers alternately."""
    roles = ("user", "assistant")
    messages = tuple({"role": roles[at % 2], "content": text} for at, text in enumerate(texts))
    turn = TurnCall("r", ChatPrompt(messages), GREEDY, max_new_tokens=8, adapter=adapter)
    return KnownPlaces(100).recognized(turn)


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
        cluster.register_replica(heir.heartbeats.status())
        epoch = cluster.resolve("s", False, "").epoch
        found = [await heir.run(call([9], "s", adapter="a"), epoch) for _ in range(2)]
    assert tokens_of(found[0]) == generated([7, *first, 9])
    assert [cached(events) > 0 for events in found] == [False, True]


async def test_an_adapter_that_this_replica_lacks_leaves_no_trace(rig: Rig) -> None:
    """A front end may have newer settings."""
    epoch = rig.open_session("s")
    first = tokens_of(await rig.run(call([7], "s", adapter="a"), epoch))
    for turn, at in ((call([7], "s", adapter="new"), epoch), (chat("hello", adapter="new"), None)):
        (event,) = await rig.run(turn, at)
        assert event.error is not None
        assert (event.error.status, event.error.code) == (503, "adapter_not_loaded")
        assert event.error.param == "model"
        assert event.error.retry_after_s is not None
    assert rig.unnamed._sessions.held() == []
    second = await rig.run(call([9], "s", adapter="a"), epoch)
    assert tokens_of(second) == generated([7, *first, 9])
    assert cached(second) == len(first)


@pytest.mark.parametrize("told", [None, 3])
async def test_a_turn_that_was_committed_is_answered_where_its_adapter_is_not(
    rig: Rig, tmp_path: Path, told: int | None
) -> None:
    """The log has the answer. A retry, or a front end that goes on after a loss (it has `told` tokens), was refused."""
    epoch = rig.open_session("s")
    turn = call([7], "s", key="k", adapter="a")
    first = await rig.run(turn, epoch)
    async with running_rig(tmp_path, controller=rig.controller, replica_id="b") as heir:
        assert isinstance(heir.engine, LocalEngine)
        heir.engine._facts = dataclasses.replace(heir.engine._facts, adapters={})
        cluster = rig.controller.cluster
        cluster.report_unreachable(rig.replica_id, True)
        cluster.register_replica(heir.heartbeats.status())
        epoch = cluster.resolve("s", False, "").epoch
        if told is not None:
            turn = replace(turn, resumed=ResumedTurn(tuple(tokens_of(first)[:told]), (), (), 0))
        (again,) = await heir.run(turn, epoch)
        assert again.error is None, again.error
        assert again.replayed
        assert tokens_of([again]) == tokens_of(first)
        (refused,) = await heir.run(call([9], "s", adapter="a"), epoch)
        assert refused.error is not None
        assert refused.error.code == "adapter_not_loaded"
        assert cached(await heir.run(call([9], "s"), epoch)) == 0


async def test_a_key_tells_an_adapter_from_strict_calls(rig: Rig) -> None:
    """Both are texts at the end of what is hashed."""
    digests = [await rig.builder.digests(call([7], strict_calls="[]")), await rig.builder.digests(call([7]))]
    digests.append(await rig.builder.digests(call([7], adapter="[]")))
    assert len(set(digests)) == 3


async def test_a_conversation_without_a_name_keeps_its_kv_with_its_adapter(tmp_path: Path) -> None:
    """And no other adapter finds it. From the second turn on it is kept whole, not only the pages that are full."""
    async with running_rig(tmp_path, text=small_text()) as rig:
        for adapter in ("a", "b", ""):
            texts, found = ["hello"], []
            for question in ("more", "and more", "and more than that"):
                events = await rig.run(chat(*texts, adapter=adapter))
                found.append(cached(events))
                texts += ["".join(event.text for event in events), question]
            assert found[0] == 0 < found[1] < found[2]
            assert found[2] % PAGE_SIZE


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
        return datetime(2026, 11, cls.day)


@pytest.mark.parametrize("mode", ["full", "auto"])
async def test_a_session_changes_its_adapter_on_a_later_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: HistoryMode
) -> None:
    """Its template has the date, so that only a checkpoint leads back to its history. None was recognized after a
    change: the turn was refused as one of another conversation."""
    monkeypatch.setattr(chat_template_utils, "datetime", Calendar)
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    text = TextProcessor(byte_level_tokenizer(template), vocab_size=VOCAB_SIZE, max_context_len=512)
    front_end = KnownPlaces(100)
    async with running_rig(tmp_path, text=text) as rig:
        epoch = rig.open_session("s")
        messages: list[dict[str, str]] = []
        for day, adapter in enumerate(("", "a", "b", ""), 1):
            monkeypatch.setattr(Calendar, "day", day)
            messages.append({"role": "user", "content": f"question {day}"})
            prompt, session = ChatPrompt(tuple(messages)), SessionTurn("s", mode=mode)
            turn = TurnCall("r", prompt, GREEDY, max_new_tokens=3, session=session, adapter=adapter)
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
