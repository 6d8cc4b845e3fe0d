"""The Messages API without a client: the input of templates, the events of streams, and bad bodies."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from serving.front.api.answers.reader import AnswerPart
from serving.front.api.answers.tools import NO_TOOLS
from serving.front.api.messages.schema import MessagesBody
from serving.front.api.messages.stream import BlockEvents
from serving.front.http import create_http_app
from serving.text.answer_pieces import Thought
from serving.wire.turns import TurnFinish
from tests.unit.serving.front.test_bad_bodies import json_values
from tests.unit.serving.local_service import LocalService, client_of
from tests.unit.serving.telling_service import TellingService

PATH = "/v1/messages"
HELLO = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
GOOD: dict[str, Any] = {"messages": [HELLO], "max_tokens": 2}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def rendered(**fields: Any) -> tuple[dict[str, Any], ...]:
    return MessagesBody.model_validate({**GOOD, **fields}).prompt(NO_TOOLS).messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_what_templates_are_given() -> None:
    use = {"type": "tool_use", "id": "c-1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c-1", "is_error": True, **CACHED}
    told = rendered(
        system=[{"type": "text", "text": "one", **CACHED}, {"type": "text", "text": "two"}],
        messages=[
            HELLO,
            user({"type": "text", "text": "there", **CACHED}),
            assistant(
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "so"},
                use,
            ),
            assistant(use),
            user({**result, "content": [{"type": "text", "text": "bad"}]}, {"type": "text", "text": "go"}),
            {"role": "system", "content": "briefly"},
        ],
    )
    call = {"id": "c-1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert told == (
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": "hi\nthere"},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c-1", "content": "Error: bad"},
        {"role": "user", "content": "go"},
        {"role": "system", "content": "briefly"},
    )


@pytest.mark.parametrize(
    "sent",
    [
        {"wei": 10**30, "deep": [{"x": 1}]},
        {"messages": [{"content": [{"input": {"wei": 10**30}}]}]},
    ],
)
async def test_a_call_with_an_integer_that_does_not_travel_is_told_as_text(
    client: httpx.AsyncClient, sent: dict[str, Any]
) -> None:
    """A model may write integers of any size. The conversation could not go on after one of more than 64 bits."""
    call = {"type": "tool_use", "id": "c-1", "name": "f", "input": sent}
    result = {"type": "tool_result", "tool_use_id": "c-1", "content": "sent"}
    messages = [HELLO, assistant(call), user(result)]
    (told,) = (message for message in rendered(messages=messages) if message["role"] == "assistant")
    assert json.loads(told["tool_calls"][0]["function"]["arguments"]) == call["input"]
    reply = await client.post(PATH, json={**GOOD, "messages": messages})
    assert reply.status_code == 200, reply.text
    elsewhere = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"x": 10**30}}]}
    ]
    assert (await client.post(PATH, json={**GOOD, "messages": elsewhere})).status_code == 400


def test_instructions_for_one_turn_are_gone_in_the_next() -> None:
    note = {"role": "system", "content": "now", "clear_at": "next_user_message"}
    assert len(rendered(messages=[HELLO, note])) == 2
    assert rendered(messages=[HELLO, note, assistant(), HELLO])[1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "between_tools"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"output_config": {"effort": "high"}},
            {"enable_thinking": False, "thinking": False, "reasoning_effort": "high"},
        ),
    ],
)
def test_thinking_is_for_the_template(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    assert MessagesBody.model_validate(GOOD | fields).template_kwargs == kwargs


def test_thoughts_are_a_block_of_their_own() -> None:
    blocks = BlockEvents()
    events = [*blocks.add(AnswerPart([Thought("h")])), *blocks.add(AnswerPart([Thought("m")]))]
    events += [*blocks.add(AnswerPart(["so"])), *blocks.end()]
    assert [event["type"].removeprefix("content_block_") for event in events] == (
        ["start", "delta", "delta", "delta", "stop", "start", "delta", "stop"]
    )
    assert [event["index"] for event in events] == [0] * 5 + [1] * 3
    kinds = [event["delta"]["type"] for event in events if "delta" in event]
    assert kinds == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]


async def test_events_have_names_and_an_end_of_their_own() -> None:
    service = TellingService("a", "b")
    async with client_of(create_http_app(service)) as client:
        reply = await client.post(f"{PATH}?beta=true", json=GOOD | {"stream": True})
    events = [event.split("\n") for event in reply.text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    told = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert names == [each["type"] for each in told]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[0]["message"]["id"] == reply.headers["request-id"]


async def test_a_turn_that_is_aborted_is_an_error() -> None:
    service = TellingService("a", finish=TurnFinish("abort"))
    async with client_of(create_http_app(service)) as client:
        assert (await client.post(PATH, json=GOOD)).status_code == 499
        told = (await client.post(PATH, json=GOOD | {"stream": True})).text.strip().split("\n\n")[-1]
    assert told.startswith("event: error\n")
    assert json.loads(told.partition("data: ")[2])["error"]["message"]


async def test_what_claude_code_sends_is_taken(client: httpx.AsyncClient) -> None:
    body = {
        **GOOD,
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "You are", **CACHED}],
        "messages": [
            user({"type": "text", "text": "list files", **CACHED}),
            {"role": "system", "content": "x"},
        ],
        "tools": [{**TOOL, "eager_input_streaming": True, "defer_loading": False, "strict": True, **CACHED}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24,claude-code-20250219"}
    reply = await client.post(f"{PATH}?beta=true", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.json()["context_management"] == {"applied_edits": []}
    body = {name: value for name, value in body.items() if name not in ("max_tokens", "metadata")}
    reply = await client.post(f"{PATH}/count_tokens?beta=true", json=body, headers=headers)
    assert reply.json()["input_tokens"] > 2


async def test_no_tokens_are_only_a_prompt(client: httpx.AsyncClient) -> None:
    reply = (await client.post(PATH, json=GOOD | {"max_tokens": 0})).json()
    assert (reply["content"], reply["stop_reason"]) == ([], "max_tokens")


def image(**fields: Any) -> dict[str, Any]:
    return {"type": "image", "source": {}, **fields}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [user()]}, "messages[0].content"),
    ({"messages": [user(image())]}, "messages[0].content[0]: type 'image'"),
    ({"messages": [user({"type": "document"})]}, "messages[0].content[0]: type 'document'"),
    ({"messages": [user(5)]}, "messages[0].content[0]"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0]: role 'king'"),
    ({"messages": [HELLO, assistant()]}, "messages[1]: the last message"),
    ({"messages": [assistant({"type": "tool_use", "id": "1", "name": "f"})]}, "messages[0].content[0].input"),
    (
        {"messages": [user({"type": "tool_result", "tool_use_id": "1", "content": [image()]})]},
        "messages[0].content[0].content[0]: type 'image'",
    ),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0]: type 'web_search_20250305'",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "deep"}}, "thinking: type 'deep'"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema",
    ),
    ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_format.schema"),
]


async def test_bad_fields_are_named(client: httpx.AsyncClient, service: LocalService) -> None:
    for body, named in BAD:
        reply = await client.post(PATH, json={**GOOD, **body})
        told = reply.json()
        assert reply.status_code == 400, (body, told)
        assert set(told) == {"type", "error", "request_id"}
        assert told["error"]["type"] == "invalid_request_error"
        assert told["error"]["message"].startswith(named), (body, told)
    reply = await client.get(PATH)
    assert (reply.status_code, reply.json()["type"]) == (405, "error")
    await service.rig.books_are_empty()


FIELDS = [
    "messages",
    "system",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "max_tokens",
    "top_k",
    "?",
]
FIELDS += [
    "stop_sequences",
    "cache_control",
    "context_management",
    "temperature",
    "metadata",
    "output_format",
]
BLOCK_FIELDS = ["type", "text", "content", "tool_use_id", "input", "id", "name", "thinking", "cache_control"]
KINDS = ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "image"]


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A good body with some spoilt fields."""
    if draw(st.booleans()):
        return {**GOOD, **draw(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=2))}
    block = draw(st.dictionaries(st.sampled_from(BLOCK_FIELDS), json_values, max_size=3))
    block = {"type": draw(st.sampled_from(KINDS)), "text": "a", **block}
    message = {"role": draw(st.sampled_from(["user", "assistant", "system"])), "content": [block]}
    return {**GOOD, "tools": [TOOL], "messages": [message, HELLO]}


async def test_no_body_makes_a_server_error(client: httpx.AsyncClient, service: LocalService) -> None:
    examples: list[dict[str, Any]] = []
    seed_used = random.SystemRandom().randrange(2**32)

    @seed(seed_used)
    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def gather(example: dict[str, Any]) -> None:
        examples.append(example)

    gather()
    for path in (PATH, f"{PATH}/count_tokens"):
        replies = await asyncio.gather(*[client.post(path, json=body) for body in examples])
        for body, reply in zip(examples, replies, strict=True):
            assert reply.status_code < 500, (seed_used, path, body, reply.text)
            assert reply.status_code == 200 or reply.json()["type"] == "error"
    await service.rig.books_are_empty()
