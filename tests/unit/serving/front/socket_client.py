"""A client of /v1/responses over a WebSocket, message by message."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.unit.serving.local_service import MODEL

LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})


@asynccontextmanager
async def opened(url: str, headers: dict[str, str] | None = None, **options: Any) -> AsyncIterator[RawSocket]:
    address = f"{url.replace('http', 'ws', 1)}/v1/responses"
    async with connect(address, additional_headers=headers, proxy=None, max_size=None, **options) as wire:
        yield RawSocket(wire)


class RawSocket:
    def __init__(self, wire: ClientConnection) -> None:
        self.wire = wire

    async def create(self, text: str, **fields: Any) -> None:
        asked = {"model": MODEL.model_id, "temperature": 0, "max_output_tokens": 5, "input": text}
        await self.wire.send(json.dumps({"type": "response.create", **asked, **fields}))

    async def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await self.wire.recv())
        return event

    async def events(self) -> list[dict[str, Any]]:
        """The events until a response has ended or is refused."""
        events = [await self.event()]
        while events[-1]["type"] not in LAST_EVENTS:
            events.append(await self.event())
        return events

    async def response(self, text: str, **fields: Any) -> dict[str, Any]:
        await self.create(text, **fields)
        *_, last = await self.events()
        assert last["type"] != "error", last
        response: dict[str, Any] = last["response"]
        return response

    async def error(self) -> dict[str, Any]:
        (event,) = await self.events()
        assert event["type"] == "error", event
        return event
