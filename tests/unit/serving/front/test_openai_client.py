"""The official openai client against the application over real HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Literal

import openai
import pydantic
import pytest

from tests.unit.serving.local_service import MODEL
from tests.unit.serving.sdk_clients import openai_at

HELLO = {"role": "user", "content": "My dog is called Rex."}


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_at(url) as client:
        yield client


async def test_async_client(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL.model_id]
    whole = await client.chat.completions.create(
        model=MODEL.model_id, messages=[HELLO], temperature=0, max_completion_tokens=20, seed=1
    )
    assert whole.usage.completion_tokens == 20
    stream = await client.chat.completions.create(
        model=MODEL.model_id,
        messages=[HELLO],
        temperature=0,
        max_completion_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_stream_helper_adds_the_chunks_up(client: openai.AsyncOpenAI) -> None:
    asked = {"model": MODEL.model_id, "messages": [HELLO], "temperature": 0, "max_tokens": 20}
    whole = await client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    end = whole.choices[0].token_ids[4]
    async with client.chat.completions.stream(
        **asked, logprobs=True, top_logprobs=2, extra_body={"stop_token_ids": [end]}
    ) as stream:
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert len(choice.logprobs.content) == 5


async def test_sync_client_in_a_session(url: str) -> None:
    def three_turns() -> list[openai.types.CompletionUsage]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            headers = {"x-session-id": "sync", "x-session-mode": "append"}
            return [
                client.chat.completions.create(
                    model=MODEL.model_id, messages=[HELLO], max_tokens=6, extra_headers=headers
                ).usage
                for _ in range(3)
            ]

    first, second, third = await asyncio.to_thread(three_turns)
    for earlier, later in ((first, second), (second, third)):
        cached = later.prompt_tokens_details.cached_tokens
        assert cached in (earlier.total_tokens, earlier.total_tokens - 1)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(
        model=MODEL.model_id, prompt=["a dog", "a park"], n=2, max_tokens=4, logprobs=1, echo=True
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.choices[3].text.startswith("a park")
    stream = await client.completions.create(
        model=MODEL.model_id, prompt=[5, 6, 7], max_tokens=4, stream=True
    )
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"


async def test_errors_are_the_clients_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=[HELLO])
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=MODEL.model_id, messages=[HELLO], temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model=MODEL.model_id, prompt=[5] * 600, stream=True)
    assert (too_long.value.param, too_long.value.code) == ("prompt", "context_length_exceeded")


class Pet(pydantic.BaseModel, extra="forbid"):
    name: Annotated[str, pydantic.Field(max_length=8)]
    legs: Annotated[int, pydantic.Field(ge=0, le=8)]
    kind: Literal["dog", "cat"]


async def test_answers_held_to_a_schema(client: openai.AsyncOpenAI) -> None:
    """Answers that are whole, streamed, several at once, and plain completions. The null model says whatever is
    allowed."""
    asked = {"model": MODEL.model_id, "messages": [HELLO], "max_tokens": 200}
    parsed = await client.chat.completions.parse(**asked, response_format=Pet, n=3)
    assert all(isinstance(choice.message.parsed, Pet) for choice in parsed.choices)
    assert {choice.finish_reason for choice in parsed.choices} == {"stop"}
    async with client.chat.completions.stream(**asked, response_format=Pet) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Pet)
    some = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}
    reply = await client.completions.create(
        model=MODEL.model_id, prompt="a pet", max_tokens=200, extra_body={"response_format": some}
    )
    Pet.model_validate_json(reply.choices[0].text)
    thing = await client.chat.completions.create(**asked, response_format={"type": "json_object"})
    if thing.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(thing.choices[0].message.content), dict)
    assert thing.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choices", [["yes", "no"], ["a|b", "(", "a b\n", "1-2", "ä\\"], ["x"]])
async def test_answers_held_to_a_choice(client: openai.AsyncOpenAI, choices: list[str]) -> None:
    for seed in range(5):
        asked = {"model": MODEL.model_id, "temperature": 1, "seed": seed, "max_tokens": 20}
        asked["extra_body"] = {"structured_outputs": {"choice": choices}}
        chat = await client.chat.completions.create(messages=[HELLO], **asked)
        plain = await client.completions.create(prompt="a", **asked)
        assert {chat.choices[0].message.content, plain.choices[0].text} <= set(choices)
        assert {chat.choices[0].finish_reason, plain.choices[0].finish_reason} == {"stop"}


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"json": {"enum": [17, "x"]}, "disable_fallback": True}, '17|"x"'),
        ({"json_object": True, "regex": None}, r"\{.*"),
    ],
)
async def test_answers_held_as_vllm_names_it(
    client: openai.AsyncOpenAI, wanted: dict[str, object], pattern: str
) -> None:
    reply = await client.chat.completions.create(
        model=MODEL.model_id,
        messages=[HELLO],
        max_tokens=100,
        extra_body={"structured_outputs": wanted},
    )
    assert re.fullmatch(pattern, reply.choices[0].message.content, re.DOTALL)


async def test_a_schema_that_cannot_be_enforced_is_a_bad_request(client: openai.AsyncOpenAI) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"not": {"type": "null"}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL.model_id, messages=[HELLO], response_format=bad)
    assert caught.value.param == "response_format.json_schema.schema"
    assert "not" in caught.value.message
