"""A large body that would cost too much is refused before it is parsed. Other large bodies are checked outside the
event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serving.front.api import body_limits
from serving.front.api.answers.tools_schema import ToolCall
from serving.front.api.body_limits import MIB, PIECE_BYTES, BodyLimits
from serving.front.api.fields import MAX_MESSAGES
from serving.front.api.messages.history import for_template
from serving.front.api.messages.schema import CountTokensBody
from serving.front.api.openai.chat_schema import ChatBody
from serving.front.api.openai.completions_schema import CompletionBody
from serving.front.api.openai.tokenization import TokenizeBody
from serving.front.api.responses import routes
from serving.front.api.responses.items import Json
from serving.front.api.responses.store import StoredResponse
from serving.front.api.rules import ApiRules
from serving.front.api.sessions.schema import GenerateBody
from serving.front.api.strict_json import SMALL_BODY_BYTES, StrictBody, parsed_json
from serving.front.http import create_http_app
from tests.unit.serving.local_service import MODEL, client_of, local_service

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hi"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a"\\[{,:}]é'), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('a"\\,', max_size=4), inner, max_size=5)
    ),
    max_leaves=30,
)


def containers_in(value: Any) -> int:
    match value:
        case dict():
            return 1 + sum(map(containers_in, value.values()))
        case list():
            return 1 + sum(map(containers_in, value))
    return 0


def noting(threads: list[threading.Thread], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which also notes on which thread it is called."""

    def note(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return function(*args, **kwargs)

    return note


def check_all(limits: BodyLimits, text: bytes) -> int:
    """Checks the text. Returns how many pieces that took."""
    return len(list(limits.check_values(text)))


@given(JSON, st.booleans(), st.integers(1, 12))
def test_objects_and_lists_are_counted_whatever_is_in_strings(
    value: Any, ascii_only: bool, piece_bytes: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = containers_in(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(body_limits, "PIECE_BYTES", piece_bytes)
        patched.setattr(body_limits, "MOST_CONTAINERS", count)
        check_all(BodyLimits(), text)
        patched.setattr(body_limits, "MOST_CONTAINERS", count - 1)
        with pytest.raises(HTTPException, match=f"more than {count - 1} objects and lists"):
            check_all(BodyLimits(), text)


@pytest.mark.parametrize(
    "text",
    [
        b"[" + b"[]," * 100_000 + b"0]",
        b"[" + b"{}," * 100_000 + b"0]",
        b"[" + b'"",' * 200_000 + b"0]",
        b"[" + b"0," * 300_000 + b"0]",
        b"{" + b'"a":0,' * 200_000 + b'"b":0}',
        b"[" + (b"9" * 4000 + b",") * 1000 + b"0]",
    ],
)
def test_what_takes_long_to_parse_is_refused(text: bytes) -> None:
    """3 MiB of zeros in place of messages used to take 17 s of the event loop and 0.9 GiB."""
    with pytest.raises(HTTPException, match="more than") as refused:
        check_all(BodyLimits.of_context(2048), text)
    assert refused.value.status_code == 413


def test_what_fills_the_context_is_taken() -> None:
    for context_len in (2048, 131_072, 1_000_000):
        limits = BodyLimits.of_context(context_len)
        for body in (
            json.dumps({"prompt": [131_071] * context_len}),
            json.dumps({"prompt": [131_071] * context_len}, indent=4),
            json.dumps({"prompt": 'a "quoted", [text]: {here}\\n' * (context_len // 8)}),
            json.dumps({"prompt": "語" * context_len * 2}),
        ):
            if len(body) <= 32 * MIB:
                limits.check_size(len(body))
            assert check_all(limits, body.encode()) >= len(body) / PIECE_BYTES
    assert BodyLimits.of_context(2048).size_bytes < 5 * MIB
    assert BodyLimits.of_context(2048, 9).size_bytes == 9


@pytest.mark.parametrize(
    ("model", "body", "field"),
    [
        (ChatBody, {"messages": [0] * 4096}, "messages"),
        (ChatBody, {"messages": [HELLO | {"content": [0] * 1000}]}, "messages"),
        (ChatBody, {"messages": [HELLO], "tools": [0] * 500}, "tools"),
        (CompletionBody, {"prompt": [0, *["a"] * 9999]}, "prompt"),
        (GenerateBody, {"input_ids": ["a"] * 9999}, "input_ids"),
    ],
)
def test_checking_ends_at_the_first_error(model: type[StrictBody], body: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    (error,) = refused.value.errors()
    assert error["loc"][0] == field


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [HELLO] * (MAX_MESSAGES + 1)}, "messages"),
        ({"messages": [HELLO | {"content": [{"type": "text", "text": ""}] * 1025}]}, "messages[0].content"),
        ({"messages": [HELLO], "chat_template_kwargs": {"a": "b" * 70_000}}, "chat_template_kwargs"),
        ({"messages": [HELLO], "logit_bias": {str(n): 0 for n in range(16_385)}}, "logit_bias"),
        ({"messages": [HELLO], "metadata": {str(n): "" for n in range(65)}}, "metadata"),
        ({"messages": [HELLO], **{f"unknown{n}": 0 for n in range(129)}}, None),
        ({"messages": [HELLO, HELLO | {"role": "king"}], "user": "a" * SMALL_BODY_BYTES}, "messages[1].role"),
        ({"messages": [HELLO], "user": "a" * SMALL_BODY_BYTES, "weight": 1}, "weight"),
    ],
)
async def test_what_is_too_much_is_named(
    client: httpx.AsyncClient, body: dict[str, Any], named: str | None
) -> None:
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == named, reply.text


async def test_arguments_of_a_template_are_limited_for_responses_too(client: httpx.AsyncClient) -> None:
    """They are a key of a cache on the replica."""
    body = {"input": "hi", "chat_template_kwargs": {"a": "b" * 70_000}}
    reply = await client.post("/v1/responses", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "chat_template_kwargs"


async def test_others_are_served_while_a_large_body_is_counted(tmp_path: Path) -> None:
    """12 MiB of backslashes used to hold the event loop for 40 ms even before parsing."""
    turns = 0

    async def note_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with local_service(tmp_path) as service:
        app = create_http_app(service, rules=ApiRules(body_limits=lambda: BodyLimits.of_context(131_072)))
        noting = asyncio.create_task(note_turns())
        async with client_of(app) as client:
            body = b'{"user":"' + b"\\" * (8 * MIB) + b'"}'
            reply = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        noting.cancel()
    assert reply.json()["error"]["param"] == "messages"
    assert turns >= 8 * MIB / PIECE_BYTES


async def test_a_large_body_is_checked_on_a_thread_and_means_what_a_small_one_does(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    validate = ChatBody.model_validate

    def noted(value: Any, context: Any = None) -> ChatBody:
        threads.append(threading.current_thread())
        return validate(value, context=context)

    monkeypatch.setattr(ChatBody, "model_validate", noted)
    asked = {"model": MODEL.model_id, "messages": [HELLO], "temperature": 0, "max_tokens": 3}
    answers = [
        (await client.post(CHAT, json=asked | {"user": "a" * size})).json()["choices"]
        for size in (1, SMALL_BODY_BYTES)
    ]
    assert answers[0] == answers[1]
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_many_items_are_made_into_what_is_kept_on_a_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand of them held the event loop for 60 ms."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(routes, "canonical_items", noting(threads, routes.canonical_items))
    monkeypatch.setattr(StoredResponse, "note", noting(threads, StoredResponse.note))
    items = [{"role": "user", "content": "a"}] * 300
    reply = await client.post("/v1/responses", json={"input": items, "max_output_tokens": 16})
    assert reply.status_code == 400, "they fill the context"
    assert len(threads) == 2
    assert threading.main_thread() not in threads


MANY_LISTS = json.dumps({"a": [[]] * 20_000})
"""Arguments of a call. Those of two calls are too many together."""


def chat_calls(*arguments: str) -> dict[str, Any]:
    functions = ({"name": "f", "arguments": each} for each in arguments)
    calls = [{"id": "c", "type": "function", "function": function} for function in functions]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    return {"messages": [HELLO, said, {"role": "tool", "tool_call_id": "c", "content": "x"}]}


def call_items(*arguments: str) -> list[dict[str, Any]]:
    called = {"type": "function_call", "call_id": "c", "name": "f"}
    outputs = {"type": "function_call_output", "call_id": "c", "output": "x"}
    return [*(called | {"arguments": each} for each in arguments), outputs]


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/responses", "/v1/conversations"])
async def test_values_in_the_arguments_of_calls_are_counted_together(
    client: httpx.AsyncClient, path: str
) -> None:
    def body(*arguments: str) -> dict[str, Any]:
        match path:
            case "/v1/responses":
                return {"input": call_items(*arguments), "max_output_tokens": 1}
            case "/v1/conversations":
                return {"items": call_items(*arguments)}
        return chat_calls(*arguments) | ({"max_tokens": 1} if path == CHAT else {})

    assert (await client.post(path, json=body(MANY_LISTS))).status_code == 200
    refused = await client.post(path, json=body(MANY_LISTS, MANY_LISTS))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_entity_too_large")
    hidden = await client.post(path, json=body('{"', MANY_LISTS, MANY_LISTS))
    assert hidden.status_code == 413, "a text that ends within a string hides nothing of the next one"
    assert (await client.post(path, json=body("[" * 100_000))).status_code == 200, "no object is not parsed"


def cpu_s(work: Callable[[], object]) -> float:
    """The least CPU time of a few runs."""
    took = []
    for _ in range(5):
        began_s = time.process_time()
        work()
        took.append(time.process_time() - began_s)
    return min(took)


def chat_call(arguments: Json) -> Callable[[], Json]:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    return ToolCall.model_validate({"id": "c", "type": "function", "function": function}).for_template


def messages_call(arguments: Json) -> Callable[[], Json]:
    block = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    body = CountTokensBody.model_validate({"messages": [{"role": "assistant", "content": [block]}]})
    return lambda: for_template(None, body.messages)[0]["tool_calls"][0]


@pytest.mark.parametrize("shown", [chat_call, messages_call])
def test_numbers_in_the_arguments_of_a_call_are_not_looked_at_one_by_one(
    shown: Callable[[Json], Callable[[], Json]],
) -> None:
    """That took 30 ms for 99,000 numbers, on the event loop."""
    arguments = {"a": [2**63, *[0] * 99_000]}
    show = shown(arguments)
    assert show()["function"]["arguments"] == arguments
    assert cpu_s(show) < 2 * cpu_s(lambda: json.dumps(arguments))


def test_one_long_number_does_not_cost_a_look_at_every_number() -> None:
    """A seed of 19 digits was enough for a front end's event loop to be held for 30 ms by 99,000 numbers."""
    seed, body = {"seed": 2**63 - 1}, json.dumps({"seed": 2**63 - 1, "prompt": [0] * 99_000}).encode()
    limits = BodyLimits()
    assert asyncio.run(parsed_json(body, limits)) == seed | {"prompt": [0] * 99_000}
    assert cpu_s(lambda: asyncio.run(parsed_json(body, limits))) < 2 * cpu_s(lambda: json.loads(body))


@pytest.mark.parametrize(
    ("path", "body", "make"),
    [
        ("/v1/messages/count_tokens", CountTokensBody, "prompt"),
        ("/tokenize", TokenizeBody, "prompts"),
    ],
)
async def test_many_messages_are_made_into_a_prompt_on_a_thread(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: type[Any], make: str
) -> None:
    """Calls in them, 8,000 for example, held the event loop for 30 ms."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(body, make, noting(threads, getattr(body, make)))
    for num_messages in (1, 301):
        await client.post(path, json={"messages": [HELLO] * num_messages})
    assert [each is threading.main_thread() for each in threads] == [True, False]


async def test_a_schema_as_a_text_is_measured_before_it_is_parsed(client: httpx.AsyncClient) -> None:
    """It is no JSON, which only the parser would notice."""
    reply = await client.post(CHAT, json={"messages": [HELLO], "guided_json": "[" * 70_000})
    assert "at most 65536" in reply.json()["error"]["message"]
