"""Limits of long-lived WebSockets: how many there are, how long each may stay, how many of its messages may wait.

Messages are received at once and counted here until they are answered. Nothing else limits them: behind Ray Serve, all
that a client sends is read as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.status import (
    WS_1000_NORMAL_CLOSURE,
    WS_1001_GOING_AWAY,
    WS_1008_POLICY_VIOLATION,
    WS_1011_INTERNAL_ERROR,
)
from starlette.websockets import WebSocket, WebSocketDisconnect

from serving.front.api.errors import ClientGone
from serving.front.api.sse import SEND_PATIENCE_S

MOST_SOCKETS = 1024
LIFETIME_S = 3600.0
LOOK_INTERVAL_S = 5.0
CLOSE_PATIENCE_S = 5.0
MOST_MESSAGES = 64
"""How many unanswered messages one client may have."""
MESSAGES_BYTES = 2
"""How many bytes these may have together, as a multiple of the limit for one message."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message. `text` None: it was not a text message."""

    text: bytes | None
    size_bytes: int


class Sockets:
    """The WebSockets of one front end, at most `most` at a time. When all places are taken, the socket that has been
    idle for longest gives way to a new one."""

    def __init__(self, most: int = MOST_SOCKETS) -> None:
        self._most = most
        self._open: set[Socket] = set()

    def admit(self, socket: Socket) -> bool:
        """Gives the socket a place; False: all others are busy. The owner of an admitted socket must call `left`."""
        if len(self._open) >= self._most:
            idle = [each for each in self._open if each.idle_since_s is not None]
            if not idle:
                return False
            longest = min(idle, key=lambda each: each.idle_since_s or 0.0)
            longest.end(WS_1001_GOING_AWAY, "Idle, and others need the place: connect again.")
            self._open.discard(longest)
        self._open.add(socket)
        return True

    def left(self, socket: Socket) -> None:
        self._open.discard(socket)


class Socket:
    """One client's WebSocket, accepted by its owner. A message has at most `message_bytes`, which its reader checks."""

    def __init__(self, websocket: WebSocket, message_bytes: int) -> None:
        self._websocket = websocket
        self._most_bytes = MESSAGES_BYTES * message_bytes
        self._received: asyncio.Queue[Received] = asyncio.Queue()
        self._unanswered = self._unanswered_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._idle_since_s = self._opened_s
        self._sending = asyncio.Lock()
        self._sending_since_s: float | None = None
        self._end: asyncio.Future[tuple[int, str]] = self._loop.create_future()

    @property
    def idle_since_s(self) -> float | None:
        """Since when all messages are answered; None while one is not."""
        return None if self._unanswered else self._idle_since_s

    @property
    def is_old(self) -> bool:
        """Whether its lifetime is over. Then it ends as soon as it is idle, and new messages begin nothing."""
        return self._loop.time() - self._opened_s >= LIFETIME_S

    async def next(self) -> Received:
        """The next message. The reader calls `answered` for it."""
        return await self._received.get()

    def answered(self, message: Received) -> None:
        self._unanswered -= 1
        self._unanswered_bytes -= message.size_bytes
        self._idle_since_s = self._loop.time()

    async def send(self, text: bytes) -> None:
        """Sends a message. Raises ClientGone. A client that takes nothing for SEND_PATIENCE_S also counts as gone: then
        `run` ends."""
        async with self._sending:
            self._sending_since_s = self._loop.time()
            try:
                await self._websocket.send_text(text.decode())
            except (WebSocketDisconnect, RuntimeError):  # RuntimeError: it was closed from this side
                raise ClientGone from None
            self._sending_since_s = None

    def end(self, code: int = WS_1000_NORMAL_CLOSURE, reason: str = "") -> None:
        """Ends the socket with this code and reason. Only the first call counts."""
        if not self._end.done():
            self._end.set_result((code, reason))

    async def run(self, work: Coroutine[Any, Any, None], farewell: bytes) -> None:
        """Runs `work`, which reads the messages, until the client leaves or `end` is called. `work` is cancelled then,
        and has ended when this returns; `work` returns by itself if it finds the client gone. A client that has stayed
        for LIFETIME_S is sent `farewell`."""
        tasks = [asyncio.create_task(each) for each in (self._take(), self._watch(farewell), work)]
        ends: list[asyncio.Future[Any]] = [*tasks, self._end]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        unforeseen = [each for each in results if isinstance(each, Exception)]
        if unforeseen:
            self.end(WS_1011_INTERNAL_ERROR)
        await self._close()
        if unforeseen:
            raise unforeseen[0]

    async def _take(self) -> None:
        """Receives messages. Returns when the client has left, or has sent too much that is not answered."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            content = text.encode() if text is not None else message.get("bytes") or b""
            received = Received(None if text is None else content, len(content))
            self._unanswered += 1
            self._unanswered_bytes += received.size_bytes
            if self._unanswered > MOST_MESSAGES or self._unanswered_bytes > self._most_bytes:
                self.end(WS_1008_POLICY_VIOLATION, "Too much is sent before it is answered.")
                return
            self._received.put_nowait(received)

    async def _watch(self, farewell: bytes) -> None:
        """Returns when the client counts as gone, or its lifetime is over and it is idle."""
        while True:
            await asyncio.sleep(min(LOOK_INTERVAL_S, SEND_PATIENCE_S, LIFETIME_S) / 2)
            sending_s = self._sending_since_s
            if sending_s is not None and self._loop.time() - sending_s >= SEND_PATIENCE_S:
                return
            if self.is_old and self.idle_since_s is not None:
                with suppress(ClientGone):
                    await self.send(farewell)
                self.end()
                return

    async def _close(self) -> None:
        """Tells the client why the socket ends. If the client has left, or takes nothing, does nothing."""
        if not self._end.done() or self._sending_since_s is not None:
            return
        code, reason = self._end.result()
        try:
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self._websocket.close(code, reason)
        except (TimeoutError, WebSocketDisconnect, RuntimeError):
            return
