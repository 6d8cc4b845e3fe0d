"""The number of tokens of a response's input, counted beforehand, is that of the response."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.unit.serving.local_service import MODEL
from tests.unit.serving.sdk_clients import http_at, openai_at

HELLO = {"role": "user", "content": "My dog is called Rex."}
TOOL = {"type": "function", "name": "find_dog", "parameters": {"type": "object"}, "strict": False}
INPUTS: list[dict[str, Any]] = [
    {"input": "hi"},
    {"input": [HELLO, {"role": "assistant", "content": "Good."}, HELLO]},
    {"input": [HELLO], "instructions": "Be brief.", "reasoning": {"effort": "low"}},
    {"input": [HELLO], "tools": [TOOL], "tool_choice": "auto", "text": {"format": {"type": "text"}}},
]


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_at(url) as client:
        yield client


async def check(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    """Returns the response."""
    counted = await client.responses.input_tokens.count(model=MODEL.model_id, **asked)
    assert counted.object == "response.input_tokens"
    response = await client.responses.create(
        model=MODEL.model_id, max_output_tokens=4, extra_body={"temperature": 0}, **asked
    )
    assert counted.input_tokens == response.usage.input_tokens
    return response


@pytest.mark.parametrize("asked", INPUTS)
async def test_all_that_is_sent_is_counted(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> None:
    await check(client, **asked)


async def test_what_it_goes_on_from_is_counted(client: openai.AsyncOpenAI) -> None:
    first = await check(client, input=[HELLO])
    second = await check(client, input=[HELLO], previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    conversation = await client.conversations.create(items=[HELLO])
    third = await check(client, input="Who?", conversation=conversation.id)
    fourth = await check(client, input="Who?", conversation=conversation.id)
    assert fourth.usage.input_tokens > third.usage.input_tokens
    kept = [item async for item in client.conversations.items.list(conversation.id)]
    assert len(kept) == 5, "counting adds nothing"


async def test_what_is_not_there_is_refused(client: openai.AsyncOpenAI, url: str) -> None:
    count = client.responses.input_tokens.count
    with pytest.raises(openai.NotFoundError) as caught:
        await count(input="hi", previous_response_id="resp_none")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as refused:
        await count()
    assert refused.value.param == "input"
    with pytest.raises(openai.NotFoundError) as compacted:
        await client.responses.compact(model=MODEL.model_id, input="hi")
    assert compacted.value.code == "not_supported"
    async with http_at(url) as plain:
        reply = await plain.get("/v1/responses/input_tokens")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "response_not_found")
