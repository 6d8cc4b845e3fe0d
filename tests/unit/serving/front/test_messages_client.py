"""The official anthropic client against the application over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from serving.front.http import create_http_app
from serving.keys import API_KEYS, KeyRing
from serving.wire.turns import TurnFinish
from tests.unit.serving.local_service import MODEL, LocalService, http_server
from tests.unit.serving.sdk_clients import anthropic_at, anthropic_of
from tests.unit.serving.telling_service import TellingService

HELLO = {"role": "user", "content": "My dog is called Rex."}
ASKED: dict[str, Any] = {"model": MODEL.model_id, "messages": [HELLO], "max_tokens": 20}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 4}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture
async def client(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_at(url) as client:
        yield client


def greedy(**fields: Any) -> dict[str, Any]:
    """Fields for a greedy turn. This client's methods no longer have arguments for some of them, so these go into the
    body."""
    return {**ASKED, "extra_body": {"temperature": 0}, **fields}


async def test_whole_and_streamed_answers_agree(client: anthropic.AsyncAnthropic) -> None:
    whole = await client.messages.create(**greedy())
    assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 20)
    async with client.messages.stream(**greedy()) as stream:
        final = await stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    total = [
        each.usage.input_tokens + each.usage.cache_read_input_tokens + each.usage.cache_creation_input_tokens
        for each in (whole, final)
    ]
    assert total[0] == total[1]
    counted = await client.messages.count_tokens(model=MODEL.model_id, messages=[HELLO])
    assert counted.input_tokens == total[0]


async def test_sessions_report_what_was_cached(client: anthropic.AsyncAnthropic) -> None:
    headers = {"x-session-id": "s", "x-session-mode": "append"}
    first = await client.messages.create(**greedy(extra_headers=headers))
    second = await client.messages.create(**greedy(extra_headers=headers))
    known = first.usage.input_tokens + first.usage.output_tokens
    assert first.usage.cache_read_input_tokens == 0
    assert second.usage.cache_read_input_tokens in (known, known - 1)


async def test_a_call_that_must_be_made(client: anthropic.AsyncAnthropic) -> None:
    asked = greedy(tools=[WEATHER], tool_choice={"type": "tool", "name": "get_weather"}, max_tokens=300)
    whole = await client.messages.create(**asked)
    assert whole.stop_reason == "tool_use"
    (call,) = [block for block in whole.content if block.type == "tool_use"]
    assert (call.name, set(call.input)) == ("get_weather", {"city"})
    async with client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert [block.input for block in final.content] == [call.input]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": False}
    history = [HELLO, whole.to_param(), {"role": "user", "content": [result]}]
    again = await client.messages.create(**greedy(messages=history, tools=[WEATHER]))
    assert again.usage.output_tokens == 20


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_blocks_come_in_the_order_of_the_answer(size: int) -> None:
    text = f"Let me see. {CALL} And {CALL}"
    service = TellingService(*[text[start : start + size] for start in range(0, len(text), size)])
    async with anthropic_of(service) as client:
        whole = await client.messages.create(**ASKED, tools=[WEATHER])
        async with client.messages.stream(**ASKED, tools=[WEATHER]) as stream:
            final = await stream.get_final_message()
    for message in (whole, final):
        assert [block.type for block in message.content] == ["text", "tool_use", "text", "tool_use"]
        assert message.content[1].input == {"city": "Bern"}
        assert message.stop_reason == "tool_use"
    assert [block.text for block in whole.content[::2]] == [block.text for block in final.content[::2]]


async def test_a_call_that_is_cut_off_keeps_what_is_whole() -> None:
    service = TellingService(CALL.partition("Bern")[0] + "B", finish=TurnFinish("length"))
    async with anthropic_of(service) as client:
        whole = await client.messages.create(**ASKED, tools=[WEATHER])
        assert (whole.stop_reason, whole.content[0].input) == ("max_tokens", {})


async def test_stop_sequences_are_told() -> None:
    service = TellingService("some words", finish=TurnFinish("stop", "END"))
    async with anthropic_of(service) as client:
        whole = await client.messages.create(**ASKED, stop_sequences=["END"])
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")
    assert service.calls[0].stop == ("END",)


async def test_answers_held_to_a_schema(client: anthropic.AsyncAnthropic) -> None:
    held = {"format": {"type": "json_schema", "schema": SCHEMA}}
    reply = await client.messages.create(**greedy(output_config=held, max_tokens=200))
    assert set(json.loads(reply.content[0].text)) == {"city"}


async def test_errors_are_the_clients_own(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**{**ASKED, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    with pytest.raises(anthropic.BadRequestError, match=r"messages.*context"):
        await client.messages.create(**{**ASKED, "messages": [{**HELLO, "content": "dog " * 600}]})


async def test_the_tool_runner_goes_on_without_threads() -> None:
    """The runner begins with a thread. The refusal has a form that the client understands."""
    service = TellingService("Sunny.")

    @anthropic.beta_async_tool
    async def get_weather(city: str) -> str:
        """Weather."""
        return city

    async with anthropic_of(service) as client:
        answer = await client.beta.messages.tool_runner(**ASKED, tools=[get_weather]).until_done()
        assert [block.text for block in answer.content] == ["Sunny."]
        with pytest.raises(anthropic.BadRequestError, match="thread: This field is not supported") as refused:
            await client.beta.messages.create(**ASKED, thread={"type": "create"})
    assert refused.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert len(service.calls) == 1


async def test_keys(service: LocalService) -> None:
    keys = KeyRing({API_KEYS: "right"})
    async with http_server(create_http_app(service, keys=keys)) as url:
        async with anthropic_at(url, "right") as client:
            assert (await client.messages.create(**ASKED)).usage.output_tokens == 20
        async with anthropic_at(url, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
                await client.messages.create(**ASKED)
