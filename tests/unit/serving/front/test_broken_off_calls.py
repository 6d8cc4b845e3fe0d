"""The model ends its answer within a call, or a stop string does: clients must not run the call."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from msgspec.structs import replace

from serving.wire.turns import TurnFinish
from tests.unit.serving.local_service import MODEL
from tests.unit.serving.sdk_clients import anthropic_of, openai_of
from tests.unit.serving.telling_service import TOOL, WEATHER, TellingService

BROKEN_OFF = WEATHER.partition("rn")[0]
ARGUMENTS = '{"city": "Be'
ENDS = [(TurnFinish("stop", 2), "end_turn"), (TurnFinish("stop", "END"), "stop_sequence")]
ASKED: dict[str, Any] = {"model": "null-model", "messages": [{"role": "user", "content": "Which weather?"}]}
RESPONSES: dict[str, Any] = {
    "model": "null-model",
    "input": "Which weather?",
    "tools": [{"type": "function", "name": "get_weather", "parameters": None, "strict": False}],
    "store": False,
}


def telling(*pieces: str, finish: TurnFinish = ENDS[0][0]) -> TellingService:
    return TellingService(*pieces, finish=finish)


@pytest.mark.parametrize(("finish", "reason"), ENDS)
@pytest.mark.parametrize("before", ["", WEATHER + "\n"], ids=["alone", "after a whole call"])
async def test_messages_do_not_ask_for_a_call_that_was_broken_off(
    before: str, finish: TurnFinish, reason: str
) -> None:
    ran = []

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather."""
        ran.append(city)
        return "sunny"

    async with anthropic_of(telling(before, *BROKEN_OFF, finish=finish)) as client:
        asked = {**ASKED, "max_tokens": 50, "tools": [get_weather.to_dict()]}
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        runner = client.beta.messages.tool_runner(**{**asked, "tools": [get_weather]})
        last = [message async for message in runner][-1]
    assert [each.stop_reason for each in (whole, streamed, last)] == [reason] * 3
    assert whole.content[-1].name == streamed.content[-1].name == "get_weather"
    assert ran == []


@pytest.mark.parametrize(("finish", "_"), ENDS)
async def test_chats_end_with_a_stop(finish: TurnFinish, _: str) -> None:
    async with openai_of(telling(*BROKEN_OFF, finish=finish)) as client:
        choice = (await client.chat.completions.create(**ASKED, tools=[TOOL])).choices[0]
        stream = await client.chat.completions.create(**ASKED, tools=[TOOL], stream=True)
        reasons = [chunk.choices[0].finish_reason async for chunk in stream]
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS
    assert (choice.finish_reason, reasons[-1]) == ("stop", "stop")


async def test_an_item_of_a_response_is_incomplete() -> None:
    async with openai_of(telling("Let me see.\n", WEATHER, "\n", *BROKEN_OFF)) as client:
        whole = await client.responses.create(**RESPONSES)
        stream = await client.responses.create(**RESPONSES, stream=True)
        events = [event async for event in stream]
    done = [event.item.status for event in events if event.type == "response.output_item.done"]
    expected = ["completed", "completed", "incomplete"]
    assert [item.status for item in whole.output] == [item.status for item in events[-1].response.output]
    assert [item.status for item in whole.output] == done == expected
    assert whole.output[-1].arguments == ARGUMENTS
    assert whole.status == events[-1].response.status == "completed"


@pytest.mark.parametrize("kind", ["function", "custom"])
async def test_an_item_of_a_call_is_incomplete_whatever_follows_it(kind: str) -> None:
    """GPT-OSS can end a message within a call, and say more. The call used to be completed then."""
    calls = [
        f"<|channel|>commentary to=functions.get_weather <|message|>{arguments}<|call|><|start|>assistant"
        for arguments in ('{"input": "Bern"}', '{"input": "Be')
    ]
    service = TellingService(*calls, "<|channel|>final<|message|>I do not know.")
    service.model = replace(MODEL, tool_calls="gpt_oss", reasoning="gpt_oss")
    offered = {"type": "custom", "name": "get_weather"} if kind == "custom" else RESPONSES["tools"][0]
    async with openai_of(service) as client:
        response = await client.responses.create(**RESPONSES | {"tools": [offered]})
        stream = await client.responses.create(**RESPONSES | {"tools": [offered]}, stream=True)
        done = [each.item async for each in stream if each.type == "response.output_item.done"]
    said = [(item.type, item.status) for item in response.output]
    call = "function_call" if kind == "function" else "custom_tool_call"
    assert said == [(item.type, item.status) for item in done]
    assert said == [(call, "completed"), (call, "incomplete"), ("message", "completed")]


async def test_a_whole_call_is_still_to_be_run() -> None:
    """Its end tag may be missing: some models forget it."""
    whole = WEATHER.removesuffix("\n</tool_call>")
    service = telling(*whole)
    async with anthropic_of(service) as client, openai_of(service) as openai_sdk:
        tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
        message = await client.messages.create(**ASKED, max_tokens=50, tools=tools)
        choice = (await openai_sdk.chat.completions.create(**ASKED, tools=[TOOL])).choices[0]
        response = await openai_sdk.responses.create(**RESPONSES)
    assert (message.stop_reason, choice.finish_reason) == ("tool_use", "tool_calls")
    assert response.output[0].status == "completed"
