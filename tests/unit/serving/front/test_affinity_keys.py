"""What names the requests that should be at one replica, in each protocol."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from serving.front.api.rules import AffinityRules, ApiRules
from serving.front.http import create_http_app
from tests.unit.serving.local_service import LocalService, http_server, local_service
from tests.unit.serving.sdk_clients import http_at

ALL = AffinityRules(user=True, cookie="stick")
MESSAGES = [{"role": "user", "content": "one"}]
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2})
TEXT: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "one", "max_tokens": 2})
RESPONSES: tuple[str, dict[str, Any]] = ("/v1/responses", {"input": "one", "max_output_tokens": 2})
ANTHROPIC: tuple[str, dict[str, Any]] = ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2})
SGLANG: tuple[str, dict[str, Any]] = (
    "/generate",
    {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}},
)
BY_USER = {"user": "ann"}
BY_USER_ID = {"metadata": {"user_id": "ann"}}


@asynccontextmanager
async def served(directory: Path, rules: AffinityRules) -> AsyncIterator[tuple[str, LocalService]]:
    async with (
        local_service(Path(tempfile.mkdtemp(dir=directory))) as service,
        http_server(create_http_app(service, rules=ApiRules(affinity_rules=rules))) as url,
    ):
        yield url, service


async def key_of(
    directory: Path,
    rules: AffinityRules,
    asked: tuple[str, dict[str, Any]],
    cookies: Mapping[str, str] = {},
    **fields: Any,
) -> str:
    """The key of the call that the request makes."""
    path, body = asked
    async with served(directory, rules) as (url, service):
        async with http_at(url, cookies=dict(cookies)) as client:
            reply = await client.post(path, json=body | fields)
        assert reply.status_code == 200, reply.text
        (call,) = service.calls
        return call.affinity_key


@pytest.mark.parametrize(
    ("asked", "fields"),
    [(CHAT, BY_USER), (TEXT, BY_USER), (RESPONSES, BY_USER), (ANTHROPIC, BY_USER_ID)],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
async def test_the_user_counts_if_its_operator_says_so(
    tmp_path: Path, asked: tuple[str, dict[str, Any]], fields: dict[str, Any]
) -> None:
    assert await key_of(tmp_path, AffinityRules(), asked, **fields) == ""
    assert await key_of(tmp_path, AffinityRules(user=True), asked, **fields) == "user:ann"


@pytest.mark.parametrize("asked", [CHAT, TEXT, RESPONSES, ANTHROPIC, SGLANG], ids=lambda each: each[0])
async def test_a_cookie_counts_if_its_operator_names_it(
    tmp_path: Path, asked: tuple[str, dict[str, Any]]
) -> None:
    cookies = {"stick": "a7", "other": "b"}
    assert await key_of(tmp_path, AffinityRules(), asked, cookies) == ""
    assert await key_of(tmp_path, AffinityRules(cookie="third"), asked, cookies) == ""
    assert await key_of(tmp_path, AffinityRules(cookie="stick"), asked, cookies) == "cookie:a7"


async def test_the_most_exact_name_counts(tmp_path: Path) -> None:
    cookies = {"stick": "ann"}
    assert await key_of(tmp_path, ALL, CHAT, cookies, prompt_cache_key="ann", **BY_USER) == "key:ann"
    assert await key_of(tmp_path, ALL, CHAT, cookies, **BY_USER) == "user:ann"
    assert await key_of(tmp_path, ALL, CHAT, cookies) == "cookie:ann"
    assert await key_of(tmp_path, AffinityRules(), RESPONSES, prompt_cache_key="ann") == "key:ann"


async def test_a_websockets_cookie_is_that_of_its_handshake(tmp_path: Path) -> None:
    async with served(tmp_path, ALL) as (url, service):
        address = f"{url.replace('http', 'ws', 1)}/v1/responses"
        async with connect(address, additional_headers={"cookie": "stick=a7"}) as socket:
            await socket.send(json.dumps({"type": "response.create", **RESPONSES[1]}))
            async for message in socket:
                if json.loads(message)["type"] in ("response.completed", "response.incomplete"):
                    break
        assert [call.affinity_key for call in service.calls] == ["cookie:a7"]
