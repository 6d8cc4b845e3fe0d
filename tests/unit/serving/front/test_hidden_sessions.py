"""The sessions of stored responses and conversations: no other call adds to them, and no other session is taken for
one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.serving.local_service import LocalService, local_client

Client = tuple[httpx.AsyncClient, LocalService]
HI = [{"role": "user", "content": "hi"}]
BY_HEADER: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    ("/v1/messages", {"model": "null-model", "messages": HI, "max_tokens": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
]


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Client]:
    async with local_client(tmp_path) as opened:
        yield opened


async def made(client: httpx.AsyncClient, path: str, **body: Any) -> str:
    reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


async def test_only_their_own_calls_add_to_them(local: Client) -> None:
    """A chat that named a conversation's session was answered, and the conversation was a 404 from then on."""
    client, service = local
    conversation_id = await made(client, "/v1/conversations", items=HI)
    response_id = await made(client, "/v1/responses", input="hi", max_output_tokens=2)
    before = {session.session_id: session.turns for session in service.cluster.sessions()}
    assert sorted(name[:5] for name in before) == ["conv-", "resp-"]
    for name in before:
        for path, body in BY_HEADER:
            reply = await client.post(path, json=body, headers={"x-session-id": name})
            assert (reply.status_code, "x-session-id" in reply.json()["error"]["message"]) == (400, True)
        body = {"text": "hi", "session_params": {"id": name}, "sampling_params": {"max_new_tokens": 2}}
        reply = await client.post("/generate", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "session_params.id")
    assert {session.session_id: session.turns for session in service.cluster.sessions()} == before
    for path in (f"/v1/conversations/{conversation_id}", f"/v1/responses/{response_id}"):
        assert (await client.get(path)).status_code == 200


async def test_a_client_may_name_a_session_much_alike(local: Client) -> None:
    client, _ = local
    path, body = BY_HEADER[0]
    for name in ("conv-1", "resp-" + "x" * 32, "conv-" + "0" * 31):
        reply = await client.post(path, json=body, headers={"x-session-id": name})
        assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("tree", "rid", "path"),
    [
        ("conv-x", "r1", "/v1/conversations/conv_x%1Fr1"),
        ("resp-x", "r" * 30, f"/v1/responses/resp_x%1F{'r' * 30}{'0' * 16}"),
    ],
)
async def test_a_request_of_a_tree_is_none_of_them(local: Client, tree: str, rid: str, path: str) -> None:
    """To read it in this way was a 500, and to delete it closed the request's session."""
    client, _ = local
    await client.post("/open_session", json={"capacity_of_str_len": 100, "session_id": tree})
    body: dict[str, Any] = {"text": "hello", "rid": rid, "sampling_params": {"max_new_tokens": 2}}
    assert (await client.post("/generate", json=body | {"session_params": {"id": tree}})).status_code == 200
    for method in ("GET", "DELETE"):
        assert (await client.request(method, path)).status_code == 404
    on = body | {"rid": "on", "session_params": {"id": tree, "rid": rid}}
    assert (await client.post("/generate", json=on)).status_code == 200


async def test_a_session_that_is_no_conversation_is_not_closed_as_one(local: Client) -> None:
    client, service = local
    name = "0" * 32
    opened = await client.post("/v1/kedge/sessions", json={"session_id": f"conv-{name}"})
    assert opened.status_code == 201
    for method in ("GET", "DELETE"):
        assert (await client.request(method, f"/v1/conversations/conv_{name}")).status_code == 404
    assert [session.session_id for session in service.cluster.sessions()] == [f"conv-{name}"]
