"""Strict functions over HTTP in each protocol: what a turn holds calls to, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.serving.local_service import LocalService

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
UNENFORCED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
ANY = {"type": "object"}
ASKED = [{"role": "user", "content": "hi"}]
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def tool(path: str, name: str, schema: dict[str, Any], strict: bool | None) -> dict[str, Any]:
    said = {} if strict is None else {"strict": strict}
    match path:
        case "/v1/chat/completions":
            return {"type": "function", "function": {"name": name, "parameters": schema, **said}}
        case "/v1/responses":
            return {"type": "function", "name": name, "parameters": schema, **said}
        case _:
            return {"name": name, "input_schema": schema, **said}


def body(path: str, *tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    match path:
        case "/v1/chat/completions":
            asked: dict[str, Any] = {"messages": ASKED, "max_tokens": 3}
        case "/v1/responses":
            asked = {"input": "hi", "max_output_tokens": 3, "store": False}
        case _:
            asked = {"messages": ASKED, "max_tokens": 3, "model": "null-model"}
    return {**asked, "tools": list(tools), **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("strict", [True, False, None])
async def test_which_functions_calls_are_held_to(
    client: httpx.AsyncClient, service: LocalService, path: str, strict: bool | None
) -> None:
    by_default = path == "/v1/responses"
    tools = (tool(path, "f", SCHEMA, strict), tool(path, "g", SCHEMA, False))
    reply = await client.post(path, json=body(path, *tools))
    assert reply.status_code == 200, reply.text
    (call,) = service.calls
    assert call.constraint is None
    if strict is False or (strict is None and not by_default):
        assert call.strict_calls is None
        return
    assert json.loads(call.strict_calls or "") == {
        "format": "hermes",
        "reasoning": None,
        "functions": [
            {"name": "f", "parameters": SCHEMA, "must": strict is True},
            {"name": "g", "parameters": ANY, "must": False},
        ],
    }


@pytest.mark.parametrize("path", PATHS)
async def test_where_the_model_does_not_choose_it_says_nothing(
    client: httpx.AsyncClient, service: LocalService, path: str
) -> None:
    anthropic = path == "/v1/messages"
    for word in ("none", "any" if anthropic else "required"):
        choice = {"type": word} if anthropic else word
        asked = body(path, tool(path, "f", SCHEMA, True), tool_choice=choice)
        assert (await client.post(path, json=asked)).status_code == 200
        assert service.calls[-1].strict_calls is None


@pytest.mark.parametrize("path", PATHS)
async def test_what_cannot_be_enforced_is_refused_by_its_name(
    client: httpx.AsyncClient, service: LocalService, path: str
) -> None:
    tools = (tool(path, "fine", SCHEMA, True), tool(path, "bad", UNENFORCED, True))
    reply = await client.post(path, json=body(path, *tools))
    error = reply.json()["error"]
    assert (reply.status_code, error.get("param", "tools")) == (400, "tools"), error
    assert 'cannot be enforced: bad: Unimplemented keys: ["uniqueItems"]' in error["message"]
    long = {"type": "object", "properties": {"a": {"description": "x" * 70_000}}}
    reply = await client.post(path, json=body(path, tool(path, "f", long, True)))
    assert reply.status_code == 400
    assert "65536 are allowed" in reply.json()["error"]["message"]
    await service.rig.books_are_empty()


async def test_what_responses_hold_by_default_is_no_reason_to_refuse(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    path = "/v1/responses"
    long = {"type": "object", "properties": {"a": {"description": "x" * 70_000}}}
    asked = body(path, tool(path, "bad", UNENFORCED, None), tool(path, "fine", SCHEMA, True))
    assert (await client.post(path, json=asked)).status_code == 200
    asked = body(path, tool(path, "long", long, None), tool(path, "fine", SCHEMA, True))
    assert (await client.post(path, json=asked)).status_code == 200
    held = json.loads(service.calls[-1].strict_calls or "")["functions"]
    assert [(each["name"], each["parameters"]) for each in held] == [("long", ANY), ("fine", SCHEMA)]
    custom = {"type": "custom", "name": "patch"}
    assert (await client.post(path, json=body(path, custom))).status_code == 200
    assert service.calls[-1].strict_calls is None


async def test_a_format_for_the_answer_holds_all_of_it(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    path = "/v1/chat/completions"
    asked = body(path, tool(path, "f", SCHEMA, True), response_format={"type": "json_object"})
    assert (await client.post(path, json=asked)).status_code == 200
    (call,) = service.calls
    assert call.constraint is not None
    assert call.strict_calls is None
