"""Headers about sessions either count or are refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.serving.local_service import local_client

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO | {"max_tokens": 2},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/messages": HELLO | {"max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}
COUNTS = {"/v1/messages/count_tokens": HELLO, "/v1/responses/input_tokens": {"input": "hi"}}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with local_client(tmp_path) as (client, _):
        yield client


def check_refused(reply: httpx.Response, header: str) -> None:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["message"].startswith(f"{header}: ")
    assert error.get("param", header) == header


@pytest.mark.parametrize("header", ["x-session-mode", "x-session-turn"])
@pytest.mark.parametrize("path", BODIES)
async def test_without_a_session_they_are_refused(client: httpx.AsyncClient, path: str, header: str) -> None:
    said = {"x-session-mode": "append", "x-session-turn": "0"}[header]
    check_refused(await client.post(path, json=BODIES[path], headers={header: said}), header)
    headers = {"x-session-id": "s", header: said}
    assert (await client.post(path, json=BODIES[path], headers=headers)).status_code == 200


@pytest.mark.parametrize("mode", ["full", "auto"])
async def test_a_text_completion_only_adds_to_its_session(client: httpx.AsyncClient, mode: str) -> None:
    headers = {"x-session-id": "s", "x-session-mode": mode}
    path = "/v1/completions"
    check_refused(await client.post(path, json=BODIES[path], headers=headers), "x-session-mode")


@pytest.mark.parametrize(("header", "said"), [("id", "s"), ("mode", "full"), ("turn", "0")])
@pytest.mark.parametrize("path", COUNTS)
async def test_counts_know_no_sessions(client: httpx.AsyncClient, path: str, header: str, said: str) -> None:
    name = f"x-session-{header}"
    check_refused(await client.post(path, json=COUNTS[path], headers={name: said}), name)
    assert (await client.post(path, json=COUNTS[path])).status_code == 200
