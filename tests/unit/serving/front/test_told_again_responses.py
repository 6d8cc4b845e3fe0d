"""Streams of responses that are read again, at any front end, of running responses and of stored ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from serving.front.api.responses import background as responses_background
from serving.front.api.responses.replayable_turn import ending
from serving.front.api.responses.stream import CharacterNumbers, EventNumbers
from serving.text.tool_calls.formats import FormatName
from serving.wire.turns import ChatPrompt, ErrorInfo, TurnCall, TurnEvent
from tests.unit.serving.front.test_background_responses import SLOW_S, FrontEnds, front_ends
from tests.unit.serving.responses_client import MODEL, WEATHER, Served, expected, user

BACKGROUND = [
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]


@pytest.fixture
async def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FrontEnds]:
    monkeypatch.setattr(responses_background, "NEWCOMER_GRACE_S", 0.0)
    monkeypatch.setattr(responses_background, "LOOK_INTERVAL_S", 0.02)
    async with front_ends(tmp_path, 2) as cluster:
        yield cluster


async def all_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


def joined(events: Sequence[Any]) -> list[dict[str, Any]]:
    """The events as if each text had come in one piece."""
    shown: list[dict[str, Any]] = []
    for event in events:
        one = event.model_dump()
        if shown and "delta" in one and shown[-1]["type"] == one["type"]:
            one["delta"] = shown.pop()["delta"] + one["delta"]
        shown.append(one)
    return shown


@pytest.mark.parametrize("end", ["runs", "stored"])
async def test_a_stream_goes_on_behind_any_event(both: FrontEnds, end: str) -> None:
    """This holds whichever front end sends the rest, and whether or not the response has ended."""
    one, two = both.members
    both.service.rig.runner.step_s = 0.05
    stream = await one.begin(stream=True, max_output_tokens=40)
    events = []
    async for event in stream:
        events.append(event)
        if len(events) == 8:
            await stream.close()
            break
    assert [event.type for event in events[5:]] == ["response.output_text.delta"] * 3
    assert [event.type for event in events[:5]] == BACKGROUND
    response_id = events[0].response.id
    if end == "stored":
        await one.ended(response_id)
    whole = joined(
        await all_of(await two.client.responses.retrieve(response_id, stream=True))  # type: ignore[call-overload]
    )
    text = (await one.ended(response_id)).output_text
    assert whole[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert joined(events)[:5] == whole[:5]
    for count in (1, 3, 5, 6, 7, 8):
        seen = events[:count]
        behind = seen[-1].sequence_number
        for member in both.members:
            rest = await all_of(
                await member.client.responses.retrieve(response_id, stream=True, starting_after=behind)
            )
            assert joined([*seen, *rest]) == whole


async def test_a_stream_may_be_left(both: FrontEnds) -> None:
    one, _ = both.members
    both.service.rig.runner.step_s = SLOW_S
    stream = await one.begin(stream=True)
    first = await anext(aiter(stream))
    assert (first.type, first.response.status) == ("response.created", "queued")
    await stream.close()
    response = await one.ended(first.response.id)
    assert response.output_text == expected([user("one")])


async def test_it_is_told_at_once(both: FrontEnds) -> None:
    """A listener gets events before the turn has said anything, and also hears of a cancellation."""
    one, two = both.members
    both.service.rig.runner.step_s = SLOW_S
    stream = aiter(await one.begin(stream=True, max_output_tokens=100))
    first = await anext(stream)
    assert both.service.rig.turns.num_live <= 1
    listening = asyncio.create_task(
        all_of(await two.client.responses.retrieve(first.response.id, stream=True))
    )
    await asyncio.sleep(2 * SLOW_S)
    cancelled = await two.client.responses.cancel(first.response.id)
    here, there = [first, *[event async for event in stream]], await listening
    for events in (here, there):
        last = events[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert last.response.output_text == cancelled.output_text
    assert joined(here) == joined(there)


async def test_one_that_fails_says_so(both: FrontEnds) -> None:
    one, two = both.members
    events = await all_of(await one.begin("word " * 2000, stream=True))
    again = await all_of(await two.client.responses.retrieve(events[0].response.id, stream=True))
    for told in (events, again):
        assert [event.type for event in told] == [*BACKGROUND[:3], "response.failed"]
        assert told[-1].response.error.code == "context_length_exceeded"
    assert joined(events) == joined(again)


async def test_who_listens_hears_the_end_that_the_log_has(
    both: FrontEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if the front end takes a committed turn for lost."""
    run = both.service.run

    @asynccontextmanager
    async def losing_the_end(call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        async def told(events: AsyncIterator[TurnEvent]) -> AsyncIterator[TurnEvent]:
            async for event in events:
                yield event if event.finish is None else TurnEvent(error=ErrorInfo(503, "lost", "Lost."))

        async with run(call) as events:
            yield told(events)

    monkeypatch.setattr(both.service, "run", losing_the_end)
    both.service.rig.runner.step_s = 0.02
    events = await all_of(await both.members[0].begin(stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected([user("one")])
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected(
        [user("one")]
    )


async def test_who_listens_elsewhere_hears_of_a_lost_front_end(both: FrontEnds) -> None:
    one, two = both.members
    both.service.rig.runner.step_s = SLOW_S
    begun = await one.begin(max_output_tokens=100)
    listening = asyncio.create_task(all_of(await two.client.responses.retrieve(begun.id, stream=True)))
    await asyncio.sleep(3 * SLOW_S)
    await one.die()
    last = (await listening)[-1]
    assert (last.type, last.response.error.code) == ("response.failed", "server_error")


async def test_calls_are_told_again_from_within_their_arguments(both: FrontEnds) -> None:
    one, two = both.members
    events = await all_of(
        await one.begin(
            stream=True,
            tools=[WEATHER],
            tool_choice={"type": "function", "name": "get_weather"},
            max_output_tokens=300,
        )
    )
    whole = joined(await all_of(await two.client.responses.retrieve(events[0].response.id, stream=True)))
    assert joined(events) == whole
    for count in range(1, len(events), 3):
        seen = events[:count]
        rest = await all_of(
            await two.client.responses.retrieve(
                events[0].response.id, stream=True, starting_after=seen[-1].sequence_number
            )
        )
        assert joined([*seen, *rest]) == whole


async def test_a_stored_response_is_told_again(served: Served) -> None:
    stream = await served.ask("one", stream=True)
    events = await all_of(stream)
    response_id = events[0].response.id
    again = await all_of(await served.client.responses.retrieve(response_id, stream=True))
    numbers = [event.sequence_number for event in again]
    assert numbers == list(range(len(numbers)))
    without = [{**event, "sequence_number": 0} for event in joined(again)]
    assert without == [{**event, "sequence_number": 0} for event in joined(events)]
    for options in ({"stream": True, "starting_after": 1}, {"starting_after": 1}):
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.get(
                f"/responses/{response_id}",
                options={"params": {k: str(v).lower() for k, v in options.items()}},
                cast_to=object,
            )
        assert caught.value.param == "starting_after"
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(f"resp_{'0' * 48}", stream=True)


@pytest.mark.parametrize("behind", range(-1, 9))
def test_characters_have_the_numbers_wherever_a_text_is_cut(behind: int) -> None:
    told = {"type": "t"}
    for pieces in (["abcde"], ["a", "bcd", "e"], ["ab", "cde"]):
        numbers = CharacterNumbers(behind)
        events = [told, *({"type": "d", "delta": piece} for piece in pieces), told]
        left = [event for each in events if (event := numbers.numbered(each)) is not None]
        assert "".join(event.get("delta", "") for event in left) == "abcde"[max(0, behind) :]
        told_numbers = [event["sequence_number"] for event in left]
        assert [number for number in told_numbers if number in (0, 6)] == [n for n in (0, 6) if n > behind]
        assert told_numbers == sorted(set(told_numbers))


def test_events_are_counted() -> None:
    numbers = EventNumbers()
    events = [numbers.numbered({"type": "d", "delta": "abc"}) for _ in range(2)]
    assert [event and event["sequence_number"] for event in events] == [0, 1]


def test_an_end_that_failed_has_its_text_first() -> None:
    end = TurnEvent(text="abc", error=ErrorInfo(500, "c", "m"), in_thought=True)
    assert [(event.text, event.error) for event in ending(end, "c")] == [("c", None), ("abc", end.error)]
    assert ending(end, "") == [end]


@pytest.mark.parametrize("later", [None, "mistral"])
async def test_a_stored_response_is_read_in_the_format_in_which_it_was_written(
    served: Served, later: FormatName | None
) -> None:
    """Settings of the model, and the model, may change while the log keeps its responses."""
    asked: dict[str, Any] = {
        "model": MODEL.model_id,
        "temperature": 0,
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_output_tokens": 100,
    }
    conversation = await served.client.conversations.create()
    said = await served.client.responses.create(input="Hi", conversation=conversation.id, **asked)
    assert [item.type for item in said.output] == ["function_call"]
    served.service.model = replace(served.service.model, tool_calls=later)
    assert (await served.client.responses.retrieve(said.id)).output == said.output
    items = await served.client.conversations.items.list(conversation.id)
    assert [item.id for item in items.data] == [said.output[0].id, items.data[1].id]
    await served.ask("And now?", previous_response_id=said.id)
    prompt = served.service.calls[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    told = [message.get("tool_calls") for message in prompt.messages]
    assert [bool(calls) for calls in told] == [False, True, False]
