"""Turns as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any, Protocol

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from serving.front.api.errors import ClientGone
from serving.front.api.turn_headers import turn_headers
from serving.front.api.turn_streams import TurnPlan, open_turns, until_disconnect
from serving.wire.errors import error_info
from serving.wire.turns import ErrorInfo, ServiceError, TurnEvent, TurnService

KEEP_ALIVE = b": keep-alive\n\n"
SEND_PATIENCE_S = 60.0
"""A client that takes nothing for so long is gone, as far as its turn is concerned. It may have kilobytes of an answer
on their way to it that it has not read."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

logger = logging.getLogger(__name__)


class ChunkEncoder(Protocol):
    """How a protocol writes a stream: JSON texts, each of which becomes one event."""

    async def chunk(self, index: int, event: TurnEvent) -> str | None:
        """None: a later one tells it, too."""

    def closing(self) -> Iterable[str]:
        """What follows the last turn's end."""

    def error(self, info: ErrorInfo) -> dict[str, Any]:
        """The body of the error that ends a stream."""


class TurnEventStream(EventSourceResponse):
    """An event for each TurnEvent that is told, then `[DONE]`.

    A turn may wait in a queue, or for the session log. Meanwhile comments go out, which clients pass over, so that
    nobody on the way takes the connection for dead.

    The reply starts with the first event, so that a refusal still gets a status of its own; or with the first comment.
    The turns run inside the response, in one task: they end when the client goes away.
    """

    def __init__(self, service: TurnService, plan: TurnPlan, encoder: ChunkEncoder) -> None:
        self._service = service
        self._plan = plan
        self._encoder = encoder
        self._started = False
        self._sending = asyncio.Lock()
        self._sent_s = 0.0
        super().__init__((), headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_alive_s: float = scope["app"].state.keep_alive_s
        try:
            await until_disconnect(receive, self._reply(send, keep_alive_s))
        except ClientGone:
            if not self._started:
                raise

    async def _reply(self, send: Send, keep_alive_s: float) -> None:
        comments = asyncio.create_task(self._keep_alive(send, keep_alive_s))
        try:
            await self._write_turns(send)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_turns(self, send: Send) -> None:
        """Raises ClientGone, and what went wrong before the reply has started."""
        encoder = self._encoder
        try:
            async with open_turns(self._service, self._plan) as events:
                async for index, event in events:
                    text = await encoder.chunk(index, event)
                    if text is None:
                        continue
                    if not self._started:
                        self.headers.update(turn_headers(event))
                    await self._write(send, format_sse_event(data_str=text))
            for text in encoder.closing():
                await self._write(send, format_sse_event(data_str=text))
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, ServiceError):
                logger.exception("a stream broke off")
            await self._write(send, format_sse_event(data_str=json.dumps(encoder.error(error_info(error)))))
        await self._write(send, format_sse_event(data_str="[DONE]"))

    async def _keep_alive(self, send: Send, keep_alive_s: float) -> None:
        """A comment whenever nothing has been sent for so long."""
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            silent_s = loop.time() - self._sent_s
            if silent_s >= keep_alive_s:
                await self._write(send, KEEP_ALIVE)
            else:
                await asyncio.sleep(keep_alive_s - silent_s)

    async def _write(self, send: Send, body: bytes) -> None:
        """For events and comments, of which none gets into another. Raises ClientGone."""
        async with self._sending:
            try:
                async with asyncio.timeout(SEND_PATIENCE_S):
                    if not self._started:
                        self._started = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                        )
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            except TimeoutError:
                raise ClientGone from None
            self._sent_s = asyncio.get_running_loop().time()
