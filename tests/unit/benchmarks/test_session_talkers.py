"""The client of the chaos benchmark checks every turn, and finds each kind of fault that is planted in answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.failures import session_talkers
from benchmarks.failures.session_talkers import Findings, Talker
from serving.front.http import create_http_app
from tests.unit.serving.local_service import local_service

SHORT_HISTORY = 150
"""A limit that fits the null model's context of 512 tokens."""

Edit = Callable[[httpx.Request, httpx.Response, bytes], bytes]


class Meddler(httpx.AsyncBaseTransport):
    """Passes calls on and changes the replies."""

    def __init__(self, inner: httpx.ASGITransport, edit: Edit) -> None:
        self._inner = inner
        self._edit = edit

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        reply = await self._inner.handle_async_request(request)
        body = self._edit(request, reply, await reply.aread())
        headers = {name: value for name, value in reply.headers.items() if name != "content-length"}
        return httpx.Response(reply.status_code, headers=headers, content=body)


@asynccontextmanager
async def talked(directory: Path, edit: Edit) -> AsyncIterator[tuple[Findings, Talker, httpx.AsyncClient]]:
    """A talker that has had two turns of one session."""
    async with local_service(directory) as service:
        transport = Meddler(httpx.ASGITransport(create_http_app(service)), edit)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=30.0
        ) as client:
            findings = Findings()
            talker = Talker(client, findings, "seed")
            for _ in range(2):
                await talker.next_turn()
            await talker.check_answers()
            yield findings, talker, client


@pytest.fixture(autouse=True)
def one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_talkers, "LEAVING_SHARE", 0.0)
    monkeypatch.setattr(session_talkers, "GIVE_UP_S", 0.0)


def as_it_is(_request: httpx.Request, _reply: httpx.Response, body: bytes) -> bytes:
    return body


def in_session(request: httpx.Request) -> bool:
    return b"session_params" in request.content


def with_tokens(body: bytes, change: Callable[[list[int]], list[int]]) -> bytes:
    """The reply, whole or streamed, with changed `output_ids`."""

    def changed(text: bytes) -> bytes:
        fields: dict[str, Any] = json.loads(text)
        return json.dumps(fields | {"output_ids": change(fields["output_ids"])}).encode()

    if not body.startswith(b"data:"):
        return changed(body)
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line.startswith(b"data: {")]
    return b"".join(b"data: " + changed(line) + b"\n\n" for line in lines) + b"data: [DONE]\n\n"


async def listed(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    sessions = (await client.get("/v1/kedge/sessions")).json()["sessions"]
    return {session["session_id"]: session for session in sessions}


async def test_every_turn_of_a_good_server_is_checked(tmp_path: Path) -> None:
    async with talked(tmp_path, as_it_is) as (findings, talker, client):
        await talker.check_end(await listed(client))
        assert findings.wrong == []
        assert findings.turns == 2
        assert findings.all_checked
        assert (findings.asked_afresh, findings.replayed_turns) == (0, 0)
        assert not findings.failures


async def test_sessions_that_end_meanwhile_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_talkers, "LONGEST_HISTORY", SHORT_HISTORY)
    # On a busy machine a turn may have to be repeated.
    monkeypatch.setattr(session_talkers, "GIVE_UP_S", 30.0)
    async with talked(tmp_path, as_it_is) as (findings, talker, client):
        sessions = await listed(client)
        while findings.turns < 10:
            await talker.next_turn()
        assert (await listed(client)).keys() != sessions.keys()
        await talker.check_answers()
        await talker.check_end(await listed(client))
        assert findings.wrong == [], findings
        assert findings.all_checked, findings


async def test_an_answer_that_the_model_does_not_give_is_found(tmp_path: Path) -> None:
    """The answer that is sent equals the logged one, so only the model can show the fault."""

    def edit(request: httpx.Request, _reply: httpx.Response, body: bytes) -> bytes:
        return with_tokens(body, lambda ids: [*ids[:-1], 1]) if in_session(request) else body

    async with talked(tmp_path, edit) as (findings, _, _):
        assert findings.asked_afresh == 2
        assert len([line for line in findings.wrong if "afresh" in line]) == 2


async def test_an_answer_that_differs_from_the_log_is_found(tmp_path: Path) -> None:
    def edit(request: httpx.Request, reply: httpx.Response, body: bytes) -> bytes:
        replayed = "idempotent-replayed" in reply.headers
        return with_tokens(body, lambda ids: ids[:-1]) if in_session(request) and replayed else body

    async with talked(tmp_path, edit) as (findings, _, _):
        assert [line for line in findings.wrong if "logged turn" in line]


async def test_a_turn_that_runs_twice_is_found(tmp_path: Path) -> None:
    """Without its key, the second try is a turn of its own."""
    async with talked(tmp_path, as_it_is) as (findings, talker, client):

        async def lose_key(request: httpx.Request) -> None:
            request.headers.pop("idempotency-key", None)

        client.event_hooks = {"request": [lose_key]}
        await talker.next_turn()
        client.event_hooks = {"request": []}
        assert [line for line in findings.wrong if "run again" in line]
        findings.wrong.clear()
        await talker.next_turn()
        assert [line for line in findings.wrong if "where the client has had 3" in line]
        findings.wrong.clear()
        await talker.check_end(await listed(client))
        assert len(findings.wrong) == 2, findings.wrong


async def test_a_turn_that_is_lost_is_found(tmp_path: Path) -> None:
    async with talked(tmp_path, as_it_is) as (findings, talker, client):
        sessions = await listed(client)
        for session in sessions.values():
            session["turns"] -= 1
        await talker.check_end(sessions)
        assert len(findings.wrong) == 1
        assert "2 turns, the server has 1" in findings.wrong[0]
