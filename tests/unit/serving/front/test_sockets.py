"""WebSockets as connections: who gets one, how long it may last, and how much a client may send or leave unread."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket as sockets_of_the_system
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from serving.front.api import sockets
from serving.front.api.browsers import BrowserRules
from serving.front.http import create_http_app
from serving.keys import API_KEYS, KeyRing
from serving.wire.turns import TurnCall, TurnEvent
from tests.unit.serving.front.socket_client import RawSocket, opened
from tests.unit.serving.front.test_responses_socket import HeldTurns
from tests.unit.serving.local_service import LocalService, http_server, local_service

WAIT_S = 20.0
KEYS = KeyRing({API_KEYS: "open,of-acme=acme,of-other=other"})


@asynccontextmanager
async def served(directory: Path, **options: Any) -> AsyncIterator[tuple[str, LocalService]]:
    async with (
        asyncio.timeout(WAIT_S),
        local_service(directory) as service,
        http_server(create_http_app(service, **options)) as url,
    ):
        yield url, service


def key(name: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}", **more}


async def refused(url: str, headers: dict[str, str] | None = None) -> tuple[int, str, str | None]:
    """Opens a socket that is refused. Returns the handshake's status, and the code and field of its error."""
    with pytest.raises(InvalidStatus) as raised:
        async with opened(url, headers):
            pass
    response = raised.value.response
    error = json.loads(response.body)["error"]
    return response.status_code, error["code"], error["param"]


async def closed(socket: RawSocket) -> int:
    """Reads until the server closes the connection. Returns the close code."""
    with suppress(ConnectionClosed):
        while True:
            await socket.wire.recv()
    assert socket.wire.close_code is not None
    return socket.wire.close_code


async def test_a_handshake_needs_a_key_as_a_call_does(tmp_path: Path) -> None:
    async with served(tmp_path, keys=KEYS) as (url, _):
        assert await refused(url) == (401, "invalid_api_key", "authorization")
        assert await refused(url, key("wrong")) == (401, "invalid_api_key", "authorization")
        foreign = key("of-acme", **{"x-tenant-id": "other"})
        assert await refused(url, foreign) == (403, "tenant_not_allowed", "x-tenant-id")
        unnamed = key("open", **{"x-tenant-id": ""})
        assert await refused(url, unnamed) == (400, "invalid_request", "x-tenant-id")
        async with opened(url, key("open")) as socket:
            await socket.response("one")


async def test_two_keys_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path, keys=KEYS) as (url, _):
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        lines = (
            "GET /v1/responses HTTP/1.1",
            "host: localhost",
            "connection: upgrade",
            "upgrade: websocket",
            "sec-websocket-version: 13",
            "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==",
            "authorization: Bearer open",
            "authorization: Bearer of-acme",
        )
        writer.write("\r\n".join((*lines, "", "")).encode())
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "duplicate_header"


async def test_pages_of_strangers_and_unknown_names_are_refused(tmp_path: Path) -> None:
    """A browser asks nobody before it opens a WebSocket for a page."""
    async with served(tmp_path, browser_rules=BrowserRules(origins=("https://pages.example",))) as (url, _):
        for origin in ("https://evil.example", "null"):
            assert await refused(url, {"origin": origin}) == (403, "origin_not_allowed", "origin")
        async with opened(url, {"origin": "https://pages.example"}) as socket:
            await socket.response("one")
        port = urlsplit(url).port
        local = f"http://127.0.0.1:{port}"
        rebound = f"http://evil.example:{port}"
        async with opened(local):
            pass
        with pytest.raises(InvalidStatus) as raised:
            async with opened(rebound, host="127.0.0.1", port=port):
                pass
        assert json.loads(raised.value.response.body)["error"]["code"] == "host_not_allowed"


async def test_a_server_that_cannot_answer_a_handshake_closes_it(tmp_path: Path) -> None:
    """Not every ASGI server lets an application answer a handshake with a response."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async with local_service(tmp_path) as service:
        app = create_http_app(service, keys=KEYS)
        headers = [(b"host", b"localhost")]
        scope = {"type": "websocket", "path": "/v1/responses", "headers": headers, "query_string": b""}
        await app(scope, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_a_tenant_goes_on_from_its_own_responses_only(tmp_path: Path) -> None:
    async with (
        served(tmp_path, keys=KEYS) as (url, _),
        opened(url, key("of-acme")) as acme,
        opened(url, key("of-other")) as other,
    ):
        first = await acme.response("one")
        await other.create("two", previous_response_id=first["id"])
        assert (await other.error())["error"]["code"] == "previous_response_not_found"
        await acme.response("two", previous_response_id=first["id"])


async def test_a_key_that_is_taken_back_ends_what_it_opened(tmp_path: Path) -> None:
    def write(*names: str) -> None:
        entries = "".join(f"- sha256: {hashlib.sha256(name.encode()).hexdigest()}\n" for name in names)
        path.write_text(f"keys:\n{entries}")

    path = tmp_path / "keys.yaml"
    write("mine", "others")
    ring = KeyRing({}, str(path))
    async with served(tmp_path / "log", keys=ring) as (url, service):
        async with opened(url, key("mine")) as mine, opened(url, key("others")) as others:
            await mine.response("one")
            write("others")
            ring.reload()
            await mine.create("two")
            assert await closed(mine) == 1008
            await others.response("one")
        assert len(service.calls) == 2


async def test_the_idlest_gives_way_to_a_new_one(tmp_path: Path) -> None:
    async with served(tmp_path, max_websockets=2) as (url, _), opened(url) as oldest, opened(url) as used:
        await oldest.response("one")
        await used.response("one")
        async with opened(url) as newest:
            assert await closed(oldest) == 1001
            await newest.response("one")
            await used.response("two")


async def test_where_all_are_busy_no_other_is_taken(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), local_service(tmp_path) as service:
        held: Any = HeldTurns(service)
        app = create_http_app(held, max_websockets=1)
        async with http_server(app) as url, opened(url) as socket:
            await socket.create("one")
            while not held.asked:
                await asyncio.sleep(0.01)
            assert await refused(url) == (503, "too_many_connections", None)
            held.go.set()
            assert (await socket.events())[-1]["type"] == "response.incomplete"
        async with http_server(app) as url:
            for _ in range(2):  # the place is free again
                async with opened(url) as socket:
                    await socket.response("one")


async def test_a_connection_lasts_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LIFETIME_S", 1.0)
    async with asyncio.timeout(WAIT_S), local_service(tmp_path) as service:
        held: Any = HeldTurns(service)
        app = create_http_app(held)
        # The test waits for the idle connection's end. The busy one's time is over before that.
        async with http_server(app) as url, opened(url) as busy, opened(url) as idle:
            await busy.create("begun in time")
            await busy.create("behind it")
            error = await idle.error()
            assert error["error"]["code"] == "websocket_connection_limit_reached"
            assert await closed(idle) == 1000
            held.go.set()
            assert (await busy.events())[-1]["type"] == "response.incomplete", "it may end"
            assert (await busy.error())["error"]["code"] == "websocket_connection_limit_reached"
            assert await closed(busy) == 1000
        assert held.asked == ["begun in time"]


@pytest.mark.parametrize("large", [False, True])
async def test_what_is_not_answered_yet_is_bounded(tmp_path: Path, large: bool) -> None:
    async with asyncio.timeout(WAIT_S), local_service(tmp_path) as service:
        held: Any = HeldTurns(service)
        app = create_http_app(held)
        async with http_server(app) as url, opened(url) as socket:
            count, padding = (5, 14 * 1024 * 1024) if large else (sockets.MOST_MESSAGES + 1, 0)
            with suppress(ConnectionClosed):
                for _ in range(count):
                    await socket.create("one", user="u" * padding)
            assert await closed(socket) == 1008
        assert len(held.asked) <= 1


class BadlyEnding(HeldTurns):
    """A service whose turns fail when they are cancelled."""

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        try:
            async with super().run(call) as events:
                yield events
        finally:
            raise RuntimeError("a fault of ours")


async def test_a_turn_that_fails_as_it_is_cancelled_does_not_keep_its_connection(tmp_path: Path) -> None:
    """The failure used to replace the cancellation, so the next message of the lane was answered, and so on forever."""
    async with asyncio.timeout(WAIT_S), local_service(tmp_path) as service:
        held: Any = BadlyEnding(service)
        app = create_http_app(held)
        async with http_server(app) as url, opened(url) as socket:
            for _ in range(2):
                await socket.create("one", store=False)
            while not held.asked:
                await asyncio.sleep(0.01)
            with suppress(ConnectionClosed):
                for _ in range(sockets.MOST_MESSAGES):
                    await socket.create("one", store=False)
            assert await closed(socket) in (1008, 1011)
        assert len(held.asked) == 1


async def test_what_nobody_reads_ends_and_leaves_no_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "SEND_PATIENCE_S", 0.3)
    async with served(tmp_path) as (url, service):
        address = urlsplit(url)
        slow = sockets_of_the_system.socket()
        slow.setsockopt(sockets_of_the_system.SOL_SOCKET, sockets_of_the_system.SO_RCVBUF, 4096)
        slow.connect((address.hostname, address.port))
        slow.setblocking(False)
        async with opened(url, sock=slow, compression=None) as socket:
            socket.wire.transport.pause_reading()
            await socket.create("one", user="u" * 5_000_000, store=False)  # the first event repeats it
            while not service.ended:
                await asyncio.sleep(0.01)
            await service.rig.settled()
            socket.wire.transport.abort()


async def test_a_server_that_stops_says_so(tmp_path: Path) -> None:
    async with asyncio.timeout(WAIT_S), local_service(tmp_path) as service:
        app = create_http_app(service)
        async with http_server(app) as url:
            opening = opened(url)
            socket = await opening.__aenter__()
            await socket.response("one")
        assert await closed(socket) == 1012
        await opening.__aexit__(None, None, None)
