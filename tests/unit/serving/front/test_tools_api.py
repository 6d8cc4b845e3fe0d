"""Tools over HTTP on the real turns of one replica: what is refused, and calls that must be made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from msgspec.structs import replace

from serving.grammars.grammar_trial import TOO_MUCH
from serving.text.tool_calls.formats import JSON_FORMATS, NAMED_FORMATS, FormatName
from tests.unit.serving.front.test_bad_bodies import check_shape
from tests.unit.serving.local_service import MODEL, LocalService, local_client

CHAT = "/v1/chat/completions"
ASKED = {"role": "user", "content": "What is the weather in Bern?"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 4}},
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
SCHEMAS = {"get_weather": SCHEMA, "clock": {"const": {}}}
REQUIRED = {
    "messages": [ASKED],
    "tools": TOOLS,
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 300,
    "temperature": 0,
}


def numbered(count: int) -> list[dict[str, Any]]:
    """Bodies with different prompts. The null model answers each differently."""
    return [{"messages": [{**ASKED, "content": f"Question {number}"}]} for number in range(count)]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]},
    }


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def called(**changes: Any) -> dict[str, Any]:
    call = {"id": "c-1", "type": "function", "function": {"name": "clock", "arguments": "{}"}} | changes
    return {"role": "assistant", "content": None, "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "c-1", "content": "noon"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": 5}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [tool()]}, "tools[0].function.name"),
    ({"tools": [tool(name="")]}, "tools[0].function.name"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [tool(name="x" * 129)]}, "tools[0].function.name"),
    ({"tools": [tool(name='f"')]}, "tools[0].function.name"),
    ({"tools": [tool(name="f", parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(name="f", parameters={"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [tool(name="f", strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool(name="f", arguments={})]}, "tools[0].function.arguments"),
    ({"tools": [CLOCK, WEATHER, CLOCK]}, "tools[2].function.name"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": named("get_time")}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": named("clock")}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"tools": [tool(name="f", parameters={"not": {}})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool(name="f", parameters={"title": "x" * 70_000})], "tool_choice": "required"}, "tools"),
    ({"tools": [tool(name="f", parameters={"const": 2**60})], "tool_choice": "required"}, "tools"),
    ({"messages": [{"role": "tool", "content": "noon"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**RESULT, "tool_call_id": ""}]}, "messages[0].tool_call_id"),
    ({"messages": [{**ASKED, "tool_call_id": "c-1"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**ASKED, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": TOOLS, "tool_choice": allowed("none", "clock")}, "tool_choice.allowed_tools.mode"),
    (
        {"tools": TOOLS, "tool_choice": allowed("auto", "clock", "f")},
        "tool_choice.allowed_tools.tools[1].function.name",
    ),
    ({"tool_choice": allowed("auto", "clock")}, "tool_choice"),
    ({"messages": [ASKED, called(id="")]}, "messages[1].tool_calls[0].id"),
    ({"messages": [called(type="code")]}, "messages[0].tool_calls[0].type"),
    ({"messages": [called(function={"name": "f"})]}, "messages[0].tool_calls[0].function.arguments"),
    (
        {"messages": [called(function={"name": "f", "arguments": {}})]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@asynccontextmanager
async def tool_client(
    directory: Path, name: FormatName | None = "hermes"
) -> AsyncIterator[tuple[httpx.AsyncClient, LocalService]]:
    async with local_client(directory) as (client, service):
        service.model = replace(MODEL, tool_calls=name)
        yield client, service


async def ask(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    reply = await client.post(CHAT, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def checked(choice: dict[str, Any]) -> list[str]:
    """The names of the called functions. Checks that the arguments fit their schemas."""
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None), choice
    calls = [each["function"] for each in choice["message"]["tool_calls"]]
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    return [call["name"] for call in calls]


async def test_bad_fields_are_named(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, service):
        for body, param in BAD:
            reply = await client.post(CHAT, json={"messages": [ASKED], **body})
            error = check_shape(CHAT, reply)
            assert (reply.status_code, error["param"]) == (400, param), (body, error)
        await service.rig.books_are_empty()


async def test_the_reason_is_the_schemas(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, _):
        body = {**REQUIRED, "tools": [CLOCK, tool(name="f", parameters={"uniqueItems": True})]}
        error = check_shape(CHAT, await client.post(CHAT, json=body))
        reason = 'The functions\' parameters cannot be enforced: Unimplemented keys: ["uniqueItems"]'
        assert error["message"] == reason


async def test_parameters_are_bounded_as_schemas_are(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, _):
        body = {
            **REQUIRED,
            "tools": [tool(name="f", parameters={"properties": {"a": {"multipleOf": 999_983}}})],
        }
        error = check_shape(CHAT, await client.post(CHAT, json=body))
        assert TOO_MUCH in error["message"]


async def test_a_model_without_a_format_takes_no_tools(tmp_path: Path) -> None:
    async with tool_client(tmp_path, None) as (client, _):
        reply = await client.post(CHAT, json={"messages": [ASKED], "tools": TOOLS})
        error = check_shape(CHAT, reply)
        assert (error["param"], error["code"]) == ("tools", "unsupported_field")
        for asks_nothing in ({"tools": []}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}):
            await ask(client, {"messages": [ASKED, called(), RESULT], "max_tokens": 2, **asks_nothing})


@pytest.mark.parametrize("name", [*JSON_FORMATS, *NAMED_FORMATS, "pythonic"])
async def test_required_calls_are_valid_in_every_format(tmp_path: Path, name: FormatName) -> None:
    async with tool_client(tmp_path, name) as (client, _):
        for prompt in numbered(8):
            assert len(checked(await ask(client, {**REQUIRED, **prompt}))) == 1
        for function in SCHEMAS:
            body = {**REQUIRED, "tool_choice": named(function), "parallel_tool_calls": None}
            assert checked(await ask(client, body)) == [function]


async def test_several_calls_are_one_answer(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, _):
        body = {**REQUIRED, "parallel_tool_calls": True, "tools": [CLOCK], "max_tokens": 400}
        choices = [await ask(client, {**body, **prompt}) for prompt in numbered(8)]
        most = max(len(choice["message"]["tool_calls"]) for choice in choices)
        assert most > 1, "the null model ends when it likes"
        for choice in choices:
            ids = [each["id"] for each in choice["message"]["tool_calls"]]
            assert len(set(ids)) == len(ids)


async def test_choices_log_probabilities_and_streams(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, _):
        body = {**REQUIRED, "n": 2, "seed": 5, "temperature": 1, "logprobs": True, "return_token_ids": True}
        reply = (await client.post(CHAT, json=body)).json()
        for choice in reply["choices"]:
            checked(choice)
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]), "those of the calls, too"
        lines = (await client.post(CHAT, json={**body, "stream": True})).text.split("\n\n")
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        for choice in reply["choices"]:
            mine = [each["choices"][0] for each in told if each["choices"][0]["index"] == choice["index"]]
            pieces = [delta for each in mine for delta in each["delta"].get("tool_calls", [])]
            function = choice["message"]["tool_calls"][0]["function"]
            assert pieces[0]["function"]["name"] == function["name"]
            assert "".join(piece["function"]["arguments"] for piece in pieces) == function["arguments"]
            assert mine[-1]["finish_reason"] == "tool_calls"


async def test_a_stream_has_no_chunk_that_says_nothing(tmp_path: Path) -> None:
    """Most tokens of a call had one: those of its marks and its name."""
    async with tool_client(tmp_path) as (client, _):
        lines = (await client.post(CHAT, json={**REQUIRED, "stream": True})).text.split("\n\n")
        told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        *before, last = [each["choices"][0] for each in told]
        assert last["finish_reason"] == "tool_calls"
        assert all(choice["delta"] not in ({}, {"content": ""}) for choice in before), before
        assert any("tool_calls" in choice["delta"] for choice in before)


async def test_a_choice_between_calls_and_an_answer_in_a_format(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, _):
        answer = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        answer["additionalProperties"] = False
        held = {"type": "json_schema", "json_schema": {"name": "n", "schema": answer}}
        body = {**REQUIRED, "tool_choice": "auto", "response_format": held}
        reasons = set()
        for prompt in numbered(12):
            choice = await ask(client, {**body, **prompt})
            reasons.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), answer)
            else:
                checked(choice)
        assert reasons == {"stop", "tool_calls"}
        none = await ask(client, {**body, "tool_choice": "none"})
        jsonschema.validate(json.loads(none["message"]["content"]), answer)


@pytest.mark.parametrize("choice", ["required", named("clock"), allowed("required", "clock")])
async def test_a_format_is_about_text_and_an_answer_that_must_be_calls_has_none(
    tmp_path: Path, choice: str | dict[str, Any]
) -> None:
    """So asked agents with tools and a type for their last answer: OpenAI's Agents SDK, the AI SDK, instructor."""
    async with tool_client(tmp_path) as (client, _):
        held = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}
        answer = checked(await ask(client, {**REQUIRED, "tool_choice": choice, "response_format": held}))
        assert answer == checked(await ask(client, {**REQUIRED, "tool_choice": choice}))


async def test_a_tool_without_a_type_is_a_function(tmp_path: Path) -> None:
    """Hugging Face's client names a function so. vLLM and SGLang take tools without a type, too."""
    untyped = {
        "tools": [{"function": tool["function"]} for tool in TOOLS],
        "tool_choice": {"function": {"name": "clock"}},
    }
    async with tool_client(tmp_path) as (client, service):
        assert checked(await ask(client, REQUIRED | untyped)) == ["clock"]
        await ask(client, REQUIRED | {"tool_choice": named("clock")})
        left, right = service.calls
        assert (left.prompt, left.constraint) == (right.prompt, right.constraint)


async def test_a_session_has_the_tools_of_its_first_turn(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, service):
        first = await ask(client, REQUIRED, x_session_id="s")
        call_id = first["message"]["tool_calls"][0]["id"]
        result = {"messages": [{**RESULT, "tool_call_id": call_id}], "max_tokens": 2}
        for tools in (
            TOOLS,
            TOOLS[::-1],
            None,
            [{**CLOCK, "function": {"name": "clock", "strict": True}}, WEATHER],
        ):
            await ask(client, {**result, "tools": tools}, x_session_id="s")
        assert service.calls[1].prompt.messages[0]["tool_call_id"] == call_id
        for tools in ([CLOCK], [*TOOLS, tool(name="f")]):
            refused = await client.post(CHAT, json={**result, "tools": tools}, headers={"x-session-id": "s"})
            error = check_shape(CHAT, refused)
            assert (refused.status_code, error["param"], error["code"]) == (400, "tools", "tools_differ")
        fork = await client.post("/v1/kedge/sessions/s/fork", json={"new_session_id": "t"})
        assert fork.status_code == 200
        await ask(client, {**result, "tools": TOOLS}, x_session_id="t")
        refused = await client.post(CHAT, json={**result, "tools": [CLOCK]}, headers={"x-session-id": "t"})
        assert check_shape(CHAT, refused)["code"] == "tools_differ"
        await ask(client, {"messages": [ASKED], "max_tokens": 2}, x_session_id="plain")
        refused = await client.post(CHAT, json=REQUIRED, headers={"x-session-id": "plain"})
        assert "began with no tools" in check_shape(CHAT, refused)["message"]


async def test_a_turn_told_again_has_the_same_calls(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, _):
        headers = {"x_session_id": "s", "idempotency_key": "k"}
        first = await ask(client, REQUIRED, **headers)
        assert await ask(client, REQUIRED, **headers) == first
        other = {"x-session-id": "s", "idempotency-key": "k"}
        streamed = await client.post(CHAT, json={**REQUIRED, "stream": True}, headers=other)
        chunk = json.loads(streamed.text.split("\n\n")[0].removeprefix("data: "))
        (call,) = chunk["choices"][0]["delta"]["tool_calls"]
        assert {k: v for k, v in call.items() if k != "index"} == first["message"]["tool_calls"][0]
        conflict = await client.post(CHAT, json={**REQUIRED, "tools": [CLOCK]}, headers=other)
        assert check_shape(CHAT, conflict)["code"] == "idempotency_conflict"


async def test_messages_reach_the_template_as_it_expects_them(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, service):
        arguments = {
            "name": "get_weather",
            "arguments": '{"city": "Bern"}',
            "parsed_arguments": {"city": "Bern"},
        }
        broken = {"name": "clock", "arguments": '{"a'}
        first = {**called(function=arguments, index=0), "refusal": None, "parsed": None}
        messages = [ASKED, first, RESULT, called(function=broken)]
        await ask(client, {"messages": messages, "tools": TOOLS, "tool_choice": "none", "max_tokens": 2})
        prompt = service.calls[0].prompt
        assert prompt.tools == (WEATHER, CLOCK)
        _, first, result, second = prompt.messages
        assert first["content"] == ""
        assert first["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Bern"}}
        assert second["tool_calls"][0]["function"]["arguments"] == '{"a', "as a client got it back"
        assert result == {"role": "tool", "content": "noon", "tool_call_id": "c-1"}


async def test_only_allowed_tools_are_called(tmp_path: Path) -> None:
    """The model is told of all tools, as in every request with them, but the answer is held to the allowed ones."""
    async with tool_client(tmp_path) as (client, service):
        names = set()
        for body in numbered(6):
            answer = await ask(client, REQUIRED | body | {"tool_choice": allowed("required", "clock")})
            names.add(answer["message"]["tool_calls"][0]["function"]["name"])
        assert names == {"clock"}
        assert [tool["function"]["name"] for tool in service.calls[-1].prompt.tools] == [
            "get_weather",
            "clock",
        ]  # type: ignore[union-attr]


async def test_where_it_may_choose_the_model_is_told_of_the_allowed_tools_alone(tmp_path: Path) -> None:
    async with tool_client(tmp_path) as (client, service):
        await ask(client, REQUIRED | {"tool_choice": allowed("auto", "clock"), "max_tokens": 2})
        call = service.calls[-1]
        assert [tool["function"]["name"] for tool in call.prompt.tools] == ["clock"]  # type: ignore[union-attr]
        assert call.constraint is None


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"content": None, "tool_calls": []}, ""),
    ],
)
async def test_an_assistant_may_have_said_nothing(
    tmp_path: Path, message: dict[str, Any], content: str
) -> None:
    """Clients send back the answers that they got, which may have no content."""
    async with tool_client(tmp_path) as (client, service):
        messages = [ASKED, {"role": "assistant", **message}, ASKED]
        reply = await client.post(CHAT, json={"messages": messages, "max_tokens": 1})
        assert reply.status_code == 200, reply.text
        assert service.calls[-1].prompt.messages[1]["content"] == content  # type: ignore[union-attr]


@pytest.mark.parametrize("role", ["system", "user", "tool"])
async def test_null_is_an_empty_text_whoever_says_it(tmp_path: Path, role: str) -> None:
    """This is as with vLLM. A message without the field `content` is refused."""
    asked = {"role": role} | ({"tool_call_id": "c-1"} if role == "tool" else {})
    async with tool_client(tmp_path) as (client, service):
        reply = await client.post(
            CHAT, json={"messages": [{**asked, "content": None}, ASKED], "max_tokens": 1}
        )
        assert reply.status_code == 200, reply.text
        assert service.calls[-1].prompt.messages[0]["content"] == ""  # type: ignore[union-attr]
        refused = await client.post(CHAT, json={"messages": [asked, ASKED]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0]")
