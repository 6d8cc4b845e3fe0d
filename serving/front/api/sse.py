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
from serving.front.api.rules import rules_of
from serving.front.api.turn_headers import turn_headers
from serving.front.api.turn_streams import RunsTurns, TurnPlan, open_turns, until_disconnect
from serving.wire.errors import error_info
from serving.wire.turns import ErrorInfo, ServiceError, TurnEvent

SEND_PATIENCE_S = 60.0
"""A client that takes nothing for this long counts as gone, and its turn ends. Before that, buffers on the way may hold
kilobytes that it has not read."""

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

logger = logging.getLogger(__name__)


def server_event(data: bytes, name: str | None = None) -> bytes:
    """A server-sent event. Its data must be one line, as all JSON from here is. Without a name it is a `message`."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return b"%sdata: %s\n\n" % (head, data)


def typed_event(data: dict[str, Any]) -> bytes:
    """A server-sent event that is named by the `type` in its data."""
    return server_event(reply_json(data), data["type"])


KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
DONE = server_event(b"[DONE]")
"""How streams of OpenAI's and SGLang's protocols end."""


def error_then_done(body: dict[str, Any]) -> bytes:
    """How streams of these protocols end after an error."""
    return server_event(json.dumps(body).encode()) + DONE


class StreamEncoder(Protocol):
    """How a protocol writes a stream. Each method returns the bytes of whole server-sent events, none or several."""

    @property
    def keep_alive(self) -> bytes:
        """An event that clients ignore. It may be sent at any time, also as the first."""

    def accepted(self) -> bytes:
        """What is sent once all turns are accepted, before their first output; empty: nothing."""

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        """What is sent for the next event of the index-th turn. Empty: a later chunk has it."""

    def closing(self) -> bytes:
        """What ends the stream after the last turn."""

    def error(self, info: ErrorInfo) -> bytes:
        """What ends the stream after an error."""


class TurnEventStream(EventSourceResponse):
    """A reply that streams the turns' events as an encoder writes them.

    A turn may wait in a queue, or for the session log. Meanwhile the encoder's `keep_alive` is sent, so that no proxy
    takes the connection for dead.

    The reply starts once all turns are accepted, or with the first `keep_alive`. So a refusal still has its own status,
    and the client need not wait for a token to know that there will be an answer.
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
        self._send_start: Send = send
        self._send_body: Send = scope["state"]["send_body"]
        try:
            await until_disconnect(receive, self._reply(rules_of(scope["app"]).keep_alive_s))
        except ClientGone:
            if not self._started:
                raise

    async def _reply(self, keep_alive_s: float) -> None:
        try:
            async with asyncio.timeout(None) as patience:
                watch = asyncio.create_task(self._watch(keep_alive_s, patience))
                try:
                    await self._write(await self._write_turns(), ends=True)
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
        except TimeoutError:
            raise ClientGone from None

    async def _write_turns(self) -> bytes:
        """Returns what ends the stream, with the last turn's last event: each write costs a system call here and in
        each proxy. Raises ClientGone, and any error that comes before the reply has started; later errors go into the
        stream."""
        encoder, running, last = self._encoder, len(self._plan.calls), b""
        try:
            async with open_turns(self._service, self._plan) as events:
                async for index, event in events:
                    text = await self._told(index, event)
                    if text is not None and not self._started:
                        self.headers.update(turn_headers(event))
                    running -= event.finish is not None
                    if not running:
                        last = text or b""
                    elif text is not None:
                        await self._write(text)
            return last + encoder.closing()
        except ClientGone:
            raise
        except Exception as error:
            if not self._started and not last:
                raise
            if not isinstance(error, ServiceError):
                logger.exception("a stream broke off")
            return last + encoder.error(error_info(error))

    async def _told(self, index: int, event: TurnEvent) -> bytes | None:
        """What is sent for the event. Empty: the headers alone, if they are not sent yet. None: nothing."""
        if not event.says_nothing:
            return await self._encoder.chunk(index, event) or None
        self._accepted.add(index)
        return self._encoder.accepted() if len(self._accepted) == len(self._plan.calls) else None

    async def _watch(self, keep_alive_s: float, patience: asyncio.Timeout) -> None:
        """Sends a sign of life when nothing has been sent for `keep_alive_s`. Lets `patience` expire once the client
        has taken nothing for SEND_PATIENCE_S. One task watches the clock for everything that is sent."""
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
                        await self._write(self._encoder.keep_alive)
                except TimeoutError:
                    break
        patience.reschedule(loop.time())

    async def _write(self, body: bytes, *, ends: bool = False) -> None:
        """Sends whole events; a lock keeps them apart. The first time, sends status and headers before them. `ends`
        says that nothing follows."""
        async with self._sending:
            loop = asyncio.get_running_loop()
            self._sending_since_s = loop.time()
            if not self._started:
                self._started = True
                await self._send_start(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
            if body or ends:
                await self._send_body({"type": "http.response.body", "body": body, "more_body": not ends})
            self._sending_since_s = None
            self._sent_s = loop.time()
