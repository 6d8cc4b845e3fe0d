"""Turns as server-sent events."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from serving.front.api.errors import ClientGone
from serving.front.api.turn_headers import turn_headers
from serving.front.api.turn_streams import TurnPlan, open_turns, until_disconnect
from serving.wire.errors import error_info
from serving.wire.turns import ErrorInfo, ServiceError, TurnEvent, TurnService

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

logger = logging.getLogger(__name__)


class ChunkEncoder(Protocol):
    """How a protocol writes a stream: JSON texts, each of which becomes one event."""

    def chunk(self, index: int, event: TurnEvent) -> str: ...

    def closing(self) -> Iterable[str]:
        """What follows the last turn's end."""

    def error(self, info: ErrorInfo) -> dict[str, Any]:
        """The body of the error that ends a stream."""


class TurnEventStream(EventSourceResponse):
    """One event for each TurnEvent, then `[DONE]`.

    The reply starts with the first event, so that a refusal still gets a status of its own. The turns run inside the
    response, in one task: they end when the client goes away.
    """

    def __init__(self, service: TurnService, plan: TurnPlan, encoder: ChunkEncoder) -> None:
        self._chunks = self._encode(service, plan, encoder)
        self._started = False
        super().__init__(self._chunks, headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await until_disconnect(receive, self._reply(send))
        except ClientGone:
            if not self._started:
                raise

    async def _reply(self, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            body = await anext(chunks)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            async for body in chunks:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _encode(
        self, service: TurnService, plan: TurnPlan, encoder: ChunkEncoder
    ) -> AsyncGenerator[bytes]:
        try:
            async with open_turns(service, plan) as events:
                async for index, event in events:
                    body = format_sse_event(data_str=encoder.chunk(index, event))
                    if not self._started:
                        self._started = True
                        self.headers.update(turn_headers(event))
                    yield body
            for text in encoder.closing():
                yield format_sse_event(data_str=text)
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, ServiceError):
                logger.exception("a stream broke off")
            yield format_sse_event(data_str=json.dumps(encoder.error(error_info(error))))
        yield format_sse_event(data_str="[DONE]")
