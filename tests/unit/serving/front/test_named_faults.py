"""An error names the field as the client sent it, and a kind that is not served by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService, client_of, local_client, small_text
from tests.unit.serving.replica_rig import running_rig

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = {"role": "user", "content": "hi"}


def held(**fields: Any) -> dict[str, Any]:
    return {"input": "hi", "text": {"format": fields}}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (held(type="json_schema", name="x"), "text.format.schema", "invalid_request"),
        (held(type="json_schema", name="x", schema=5), "text.format.schema", "invalid_request"),
        (held(type="json_schema", name="x", schema={}, foo=5), "text.format.foo", "unknown_field"),
        (held(type="text", name="x"), "text.format.name", "unknown_field"),
        (held(type="grammar"), "text.format.type", "unsupported_field"),
        (held(), "text.format.type", "invalid_request"),
    ],
)
async def test_a_fault_of_a_format_is_named(
    tmp_path: Path, body: dict[str, Any], param: str, code: str
) -> None:
    async with local_client(tmp_path) as (client, _):
        error = (await client.post(RESPONSES, json=body)).json()["error"]
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_a_part_of_a_chat_that_is_not_served_is_named(tmp_path: Path, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:x"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]
    async with local_client(tmp_path) as (client, _):
        error = (await client.post(CHAT, json={"messages": messages})).json()["error"]
    assert (error["param"], error["code"]) == ("messages[0].content[1].type", "unsupported_field")
    assert repr(kind) in error["message"]


LONG = "b" * 300
"""With the answer more than the pool has."""


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [HELLO], "max_completion_tokens": 400}, "max_completion_tokens"),
        (CHAT, {"messages": [HELLO], "max_tokens": 400}, "max_tokens"),
        (RESPONSES, {"input": "hi", "max_output_tokens": 400}, "max_output_tokens"),
        (COMPLETIONS, {"prompt": ["a"], "max_tokens": 400}, "max_tokens"),
        (COMPLETIONS, {"prompt": ["a", LONG], "max_tokens": 3}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", LONG], "max_tokens": 3, "n": 2}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", "b" * 600, "c"], "max_tokens": 3}, "prompt[1]"),
    ],
)
async def test_what_is_too_long_for_the_pool_is_named(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async with running_rig(tmp_path, text=small_text(), num_pages=32) as rig:
        service = LocalService(rig)
        async with client_of(create_http_app(service)) as client:
            reply = await client.post(path, json=body)
            streamed = await client.post(path, json=body | {"stream": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    told = next(line for line in streamed.text.splitlines() if '"error"' in line and '"param"' in line)
    assert json.loads(told.removeprefix("data: "))["error"]["param"] == param
