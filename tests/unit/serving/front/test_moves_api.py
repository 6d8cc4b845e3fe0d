"""POST /v1/kedge/sessions/{id}/move with one replica. For two replicas see test_sessions_moved_by_hand.py."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.serving.local_service import LocalService
from tests.unit.serving.replica_rig import REPLICA_ID

SESSIONS = "/v1/kedge/sessions"
TURN = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


async def test_it_says_where_the_session_is(client: httpx.AsyncClient) -> None:
    await client.post(SESSIONS, json={"session_id": "a/b"})
    reply = await client.post(f"{SESSIONS}/a%2Fb/move", json={"to": REPLICA_ID})
    assert (reply.status_code, reply.json()) == (
        200,
        {"session_id": "a/b", "from": REPLICA_ID, "to": REPLICA_ID, "epoch": 1, "moved": False},
    )


@pytest.mark.parametrize(
    ("session_id", "body", "status", "code", "param"),
    [
        ("s", {"to": "elsewhere"}, 400, "invalid_move", "to"),
        ("s", {"to": ""}, 400, None, "to"),
        ("s", {"to": 3}, 400, None, "to"),
        ("s", {"too": REPLICA_ID}, 400, None, "too"),
        ("unknown", {"to": REPLICA_ID}, 404, "session_not_found", "session_id"),
        ("s", {}, 503, "no_replica", None),
        ("s", {"to": None}, 503, "no_replica", None),
    ],
)
async def test_what_cannot_be_is_named(
    client: httpx.AsyncClient,
    session_id: str,
    body: dict[str, Any],
    status: int,
    code: str | None,
    param: str | None,
) -> None:
    await client.post(SESSIONS, json={"session_id": "s"})
    reply = await client.post(f"{SESSIONS}/{session_id}/move", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error
    assert code is None or error["code"] == code
    assert ("retry-after" in reply.headers) == (status == 503)


async def test_a_turn_in_flight_keeps_it(client: httpx.AsyncClient, service: LocalService) -> None:
    service.rig.runner.hold()
    turn = asyncio.create_task(client.post("/v1/chat/completions", json=TURN, headers={"x-session-id": "s"}))
    await service.rig.runner.held()
    reply = await client.post(f"{SESSIONS}/s/move", json={"to": REPLICA_ID})
    service.rig.runner.go_on()
    assert (await turn).status_code == 200
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "turn_in_flight")
