"""A response that comes to nothing leaves no hidden session. Such a session used to hold KV and a place of its
tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from serving.front.api.responses import background as responses_background
from serving.wire.turns import ErrorInfo, ServiceError
from tests.unit.serving.local_service import LocalService

PATH = "/v1/responses"
SHORT = {"max_output_tokens": 4, "temperature": 0}
TOO_LONG = "x" * 2000


async def asked(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await client.post(PATH, json=SHORT | fields)
    assert reply.status_code == 200, reply.text
    response: dict[str, Any] = reply.json()
    return response


async def sessions(client: httpx.AsyncClient) -> list[str]:
    return [each["session_id"] for each in (await client.get("/v1/kedge/sessions")).json()["sessions"]]


async def become(client: httpx.AsyncClient, expected: list[str]) -> None:
    async with asyncio.timeout(20):
        while await sessions(client) != expected:
            await asyncio.sleep(0.01)


async def overloaded(*_: Any) -> None:
    raise ServiceError(ErrorInfo(503, "overloaded", "not now"))


async def two_turns(client: httpx.AsyncClient) -> str:
    """Makes two responses. Returns the id of the first: what goes on from it runs in a fork."""
    first = (await asked(client, input="one"))["id"]
    await asked(client, input="two", previous_response_id=first)
    return str(first)


@pytest.mark.parametrize("forks", [True, False])
async def test_one_that_is_refused(client: httpx.AsyncClient, forks: bool) -> None:
    first = await two_turns(client)
    known = await sessions(client)
    goes_on = {"previous_response_id": first} if forks else {}
    unheld = {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}
    for wrong in ({"input": TOO_LONG}, {"input": "a", "text": unheld}):
        for stream in (False, True):
            reply = await client.post(PATH, json=SHORT | goes_on | wrong | {"stream": stream})
            assert reply.status_code == 400, reply.text
    await become(client, known)
    await asked(client, input="three", **goes_on)
    assert len(await sessions(client)) == len(known) + 1


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
async def test_one_that_is_aborted_or_left(
    client: httpx.AsyncClient, service: LocalService, forks: bool, stream: bool, leaves: bool
) -> None:
    first = await two_turns(client)
    known = await sessions(client)
    goes_on = {"previous_response_id": first} if forks else {}
    body = SHORT | goes_on | {"input": "three", "stream": stream}
    service.rig.runner.hold()
    running = asyncio.create_task(client.post(PATH, json=body))
    await service.rig.runner.held()
    if leaves:
        running.cancel()
    else:
        await service.abort(None, all_requests=True, tenant="")
    service.rig.runner.go_on()
    await asyncio.wait([running])
    await become(client, known)


async def test_one_that_cannot_begin_in_the_background(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await two_turns(client)
    known = await sessions(client)
    monkeypatch.setattr(responses_background, "note_begun", overloaded)
    fields = SHORT | {"input": "a", "previous_response_id": first, "background": True}
    assert (await client.post(PATH, json=fields)).status_code == 503
    await become(client, known)


async def test_what_is_aborted_in_the_background_can_be_had(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session has the end of the response."""
    first = await two_turns(client)
    service.rig.runner.hold()
    response = await asked(client, input="a", previous_response_id=first, background=True)
    await service.rig.runner.held()
    heard, abort = asyncio.Event(), service.rig.engine.abort

    def hear(request_id: str) -> None:
        abort(request_id)
        heard.set()

    monkeypatch.setattr(service.rig.engine, "abort", hear)
    cancelling = asyncio.create_task(client.post(f"{PATH}/{response['id']}/cancel"))
    async with asyncio.timeout(20):
        await heard.wait()
    service.rig.runner.go_on()
    await cancelling
    assert (await client.get(f"{PATH}/{response['id']}")).json()["status"] == "cancelled"


async def test_one_that_goes_on_leaves_its_session(client: httpx.AsyncClient) -> None:
    first = (await asked(client, input="one"))["id"]
    known = await sessions(client)
    refused = {"input": TOO_LONG, "previous_response_id": first}
    reply = await client.post(PATH, json=SHORT | refused)
    assert reply.status_code == 400, reply.text
    assert await sessions(client) == known
    assert (await client.get(f"{PATH}/{first}")).status_code == 200
    # The refused request had rewound the session. Its turn used to stay in flight forever.
    await asked(client, input="two", previous_response_id=first)
    assert await sessions(client) == known
