"""With `api.unknown_fields: ignore`, unknown fields are accepted at every depth and named in a header."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serving.front.api.ignored_fields import IGNORED_FIELDS, MOST_NAMED
from serving.front.api.rules import ApiRules

CHAT = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hi"}
LONG = "x" * 70_000


@pytest.fixture
def app_options() -> dict[str, Any]:
    return {"rules": ApiRules(ignore_unknown_fields=True)}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": [HELLO], "mood": 1, "zeal": {"a": [2]}}, "mood, zeal"),
        (CHAT, {"messages": [HELLO, {**HELLO, "weight": 1}]}, "messages[1].weight"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
         "messages[0].content[0].b"),
        ("/v1/completions", {"prompt": "hi", "stream_options": {"colour": 1}, "stream": True},
         "stream_options.colour"),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2, "warmth": 1}},
         "sampling_params.warmth"),
        ("/tokenize", {"prompt": "hi", "mood": 1}, "mood"),
        ("/open_session", {"capacity_of_str_len": 1, "streaming": True, "mood": 1}, "mood"),
        # A field that takes any value has no unknown fields inside.
        (CHAT, {"messages": [HELLO], "chat_template_kwargs": {"mood": 1}, "x": 1}, "x"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("large", [False, True], ids=["small", "on a thread"])
async def test_unknown_fields_pass_and_are_named(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], named: str, large: bool
) -> None:
    """A large body is checked on a thread."""
    if large:
        body, named = {**body, "z": LONG}, f"{named}, z"
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert sorted(reply.headers[IGNORED_FIELDS].split(", ")) == sorted(named.split(", "))


@pytest.mark.parametrize("large", [False, True], ids=["small", "on a thread"])
async def test_a_name_is_no_header_of_its_own(client: httpx.AsyncClient, large: bool) -> None:
    body = {"messages": [HELLO], "a\r\nset-cookie: b": LONG if large else 1, "é, f": 1}
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200
    assert reply.headers[IGNORED_FIELDS] == "a%0D%0Aset-cookie%3A%20b, %C3%A9%2C%20f"
    assert "set-cookie" not in reply.headers


async def test_many_are_counted(client: httpx.AsyncClient) -> None:
    messages = [{**HELLO, "weight": 1}] * 2 + [{**HELLO, "weight": 1} for _ in range(30)]
    reply = await client.post("/tokenize", json={"messages": messages})
    named = reply.headers[IGNORED_FIELDS].split(", ")
    assert (named[0], len(named), named[-1]) == ("messages[0].weight", MOST_NAMED + 1, "16 more")


async def test_nothing_ignored_is_no_header(client: httpx.AsyncClient) -> None:
    reply = await client.post(CHAT, json={"messages": [HELLO]})
    assert reply.status_code == 200
    assert IGNORED_FIELDS not in reply.headers


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [HELLO], "mood": 1, "audio": {"voice": "alloy"}}, "audio"),
        ({"messages": [HELLO], "mood": 1, "temperature": -1}, "temperature"),
        ({"messages": [{**HELLO, "mood": 1, "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({f"field{index}": 1 for index in range(200)} | {"messages": [HELLO]}, None),
    ],
)
async def test_what_is_known_and_wrong_is_refused_all_the_same(
    client: httpx.AsyncClient, body: dict[str, Any], param: str | None
) -> None:
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
