"""Turns as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Protocol

from fastapi.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from serving.front.api.errors import ClientGone
from serving.front.api.reply_json import reply_json
from serving.front.api.turn_headers import turn_headers
from serving.front.api.turn_streams import RunsTurns, TurnPlan, open_turns, until_disconnect
from serving.wire.errors import error_info
from serving.wire.turns import ErrorInfo, ServiceError, TurnEvent

SEND_PATIENCE_S = 60.0
"""A client that takes nothing for so long is gone, as far as its turn is concerned. It may have kilobytes of an answer
on their way to it that it has not read."""

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

logger = logging.getLogger(__name__)


def server_event(data: bytes, name: str | None = None) -> bytes:
    """A server-sent event whose data is one line, as all JSON is that we write. Without a name it is a `message`."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)


def typed_event(data: dict[str, Any]) -> bytes:
    """One whose name is the type in its data."""
    return server_event(reply_json(data), data["type"])


KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
DONE = server_event(b"[DONE]")
"""How streams of OpenAI's and SGLang's protocols end."""


def error_then_done(body: dict[str, Any]) -> bytes:
    """How they end where something went wrong."""
    return server_event(json.dumps(body).encode()) + DONE


class StreamEncoder(Protocol):
    """How a protocol writes a stream, as the bytes of whole server-sent events: each text may have several."""

    @property
    def keep_alive(self) -> bytes:
        """What clients pass over. It goes out at any time, also before everything else."""

    def accepted(self) -> bytes:
        """What is told before the turns say anything: they will. Empty: nothing is."""

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        """Empty: a later one tells it, too."""

    def closing(self) -> bytes:
        """What follows the last turn's end, to the end of the stream."""

    def error(self, info: ErrorInfo) -> bytes:
        """The same where something went wrong."""


class TurnEventStream(EventSourceResponse):
    """The events that an encoder makes of those of the turns.

    A turn may wait in a queue, or for the session log. Meanwhile the encoder's `keep_alive` goes out, so that nobody on
    the way takes the connection for dead.

    The reply starts once all turns are accepted, so that a refusal still has a status of its own, and nobody waits for
    a token to see whether there will be an answer; or with the first `keep_alive`.
    The turns run inside the response, in one task: they end when the client goes away.
    """

    def __init__(self, service: RunsTurns, plan: TurnPlan, encoder: StreamEncoder) -> None:
        self._service = service
        self._plan = plan.telling_accepted()
        self._accepted: set[int] = set()
        self._encoder = encoder
        self._started = False
        self._sending = asyncio.Lock()
        self._sent_s = 0.0
        self._sending_since_s: float | None = None
        super().__init__((), headers=STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        keep_alive_s: float = scope["app"].state.keep_alive_s
        try:
            await until_disconnect(receive, self._reply(send, keep_alive_s))
        except ClientGone:
            if not self._started:
                raise

    async def _reply(self, send: Send, keep_alive_s: float) -> None:
        try:
            async with asyncio.timeout(None) as patience:
                watch = asyncio.create_task(self._watch(send, keep_alive_s, patience))
                try:
                    await self._write_turns(send)
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except TimeoutError:
            raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_turns(self, send: Send) -> None:
        """Raises ClientGone, and what went wrong before the reply has started."""
        encoder = self._encoder
        try:
            async with open_turns(self._service, self._plan) as events:
                async for index, event in events:
                    text = await self._told(index, event)
                    if text is None:
                        continue
                    if not self._started:
                        self.headers.update(turn_headers(event))
                    await self._write(send, text)
            await self._write(send, encoder.closing())
        except ClientGone:
            raise
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, ServiceError):
                logger.exception("a stream broke off")
            await self._write(send, encoder.error(error_info(error)))

    async def _told(self, index: int, event: TurnEvent) -> bytes | None:
        """What goes out with the event, perhaps the headers alone. None: nothing does."""
        if not event.says_nothing:
            return await self._encoder.chunk(index, event) or None
        self._accepted.add(index)
        return self._encoder.accepted() if len(self._accepted) == len(self._plan.calls) else None

    async def _watch(self, send: Send, keep_alive_s: float, patience: asyncio.Timeout) -> None:
        """Sends a sign of life when nothing has been sent for `keep_alive_s`. Lets `patience` run out once the client
        has taken nothing for SEND_PATIENCE_S. One task looks at the clock for all that is sent."""
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while True:
            now_s = loop.time()
            stuck_s = 0.0 if self._sending_since_s is None else now_s - self._sending_since_s
            silent_s = now_s - self._sent_s
            if stuck_s >= SEND_PATIENCE_S:
                break
            if self._sending_since_s is not None:
                await asyncio.sleep(min(keep_alive_s, SEND_PATIENCE_S - stuck_s))
            elif silent_s < keep_alive_s:
                await asyncio.sleep(min(keep_alive_s - silent_s, SEND_PATIENCE_S))
            else:
                try:
                    async with asyncio.timeout(SEND_PATIENCE_S):
                        await self._write(send, self._encoder.keep_alive)
                except TimeoutError:
                    break
        patience.reschedule(loop.time())

    async def _write(self, send: Send, body: bytes) -> None:
        """For whole events, of which none gets into another; the first time the status and the headers go ahead."""
        async with self._sending:
            loop = asyncio.get_running_loop()
            self._sending_since_s = loop.time()
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            self._sending_since_s = None
            self._sent_s = loop.time()
