"""OpenAI's Responses over a WebSocket: `response.create` messages, answered with the events that a stream has.

A connection has lanes, which clients name by `stream_id`. Responses of one lane are made one after another, those of
different lanes at the same time. Each message is checked as a request is: caller's key, size, JSON, fields.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, WebSocket
from starlette.status import WS_1008_POLICY_VIOLATION

from serving.front.api.affinity import AffinityKeys
from serving.front.api.body_limits import BodyLimits
from serving.front.api.dependencies import Service, Tenant
from serving.front.api.errors import ClientGone, refusal
from serving.front.api.fields import SHOWN_CHARS
from serving.front.api.responses.items import Json
from serving.front.api.responses.lane import CREATE, Lane, Memory, error_event
from serving.front.api.rules import rules_of
from serving.front.api.sockets import Received, Socket, Sockets
from serving.front.api.strict_json import SMALL_BODY_BYTES, parsed_json
from serving.wire.turns import ErrorInfo, ServiceError

MOST_LANES = 32
"""Named lanes of one connection."""
MOST_RESPONSES = 16
"""Responses that a connection makes at the same time; others wait."""
SESSION_HEADERS = ("x-session-id", "x-session-mode", "x-session-turn")

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_ALL_BUSY = ErrorInfo(
    503, "too_many_connections", "No more WebSockets are taken: all are busy.", retry_after_s=1.0
)
_OLD = ErrorInfo(
    400,
    "websocket_connection_limit_reached",
    "This connection has lasted for as long as one may: open another.",
)


def routes() -> APIRouter:
    router = APIRouter()
    router.add_api_websocket_route("/v1/responses", respond)
    return router


async def respond(websocket: WebSocket, service: Service, tenant: Tenant) -> None:
    """Serves a connection until its end. Raises ServiceError if it is not accepted."""
    _check_headers(websocket)
    rules = rules_of(websocket.app)
    limits = rules.body_limits()
    sockets: Sockets = websocket.app.state.sockets

    def make_lane(stream_id: str | None) -> Lane:
        return Lane(
            stream_id,
            socket,
            service,
            tenant,
            memory,
            AffinityKeys.of(websocket),
            rules,
        )

    socket, memory = Socket(websocket, limits.size_bytes), Memory(limits.size_bytes)
    if not sockets.admit(socket):
        raise ServiceError(_ALL_BUSY)
    try:
        await websocket.accept()
        await socket.run(Lanes(socket, limits, make_lane, websocket.state.is_known).work(), error_event(_OLD))
    finally:
        sockets.left(socket)


def _check_headers(websocket: WebSocket) -> None:
    """A named session has one turn at a time, each with headers of its own. A connection has several lanes."""
    for name in SESSION_HEADERS:
        if name in websocket.headers:
            raise refusal(
                f"{name}: not over a WebSocket. POST /v1/responses takes a named session; here, go on with "
                "previous_response_id.",
                name,
            )


@dataclass(slots=True)
class _Queue:
    """Messages that wait for a lane, each with its JSON."""

    lane: Lane
    waiting: deque[tuple[Received, Json]] = field(default_factory=deque)
    is_served: bool = False


class Lanes:
    """The lanes of one connection. `is_known`: whether its caller's key is still valid."""

    def __init__(
        self,
        socket: Socket,
        limits: BodyLimits,
        make_lane: Callable[[str | None], Lane],
        is_known: Callable[[], bool],
    ) -> None:
        self._socket = socket
        self._limits = limits
        self._make_lane = make_lane
        self._is_known = is_known
        self._room = asyncio.Semaphore(MOST_RESPONSES)
        self._default = _Queue(make_lane(None))
        self._named: dict[str, _Queue] = {}

    async def work(self) -> None:
        """Answers messages until it is cancelled, or the client is gone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._put(await self._socket.next(), tasks)
        except* ClientGone:
            pass

    async def _put(self, message: Received, tasks: asyncio.TaskGroup) -> None:
        """Puts a message into its lane's queue. A message that belongs to no lane is refused here."""
        try:
            value = await self._read(message)
            queue = self._queue_of(value.get("stream_id"))
        except Exception as error:
            await self._default.lane.refuse(error)
            self._socket.answered(message)
            return
        queue.waiting.append((message, value))
        if not queue.is_served:
            queue.is_served = True
            tasks.create_task(self._serve(queue))

    async def _read(self, message: Received) -> Json:
        """The message's JSON. Raises ServiceError or HTTPException if it is not a valid message."""
        if message.text is None:
            raise refusal("Send messages as text.", None)
        self._limits.check_size(message.size_bytes)
        value = await parsed_json(message.text, self._limits)
        if not isinstance(value, dict):
            raise refusal("Send a JSON object.", None)
        kind = value.get("type")
        if kind != CREATE:
            what = "missing" if kind is None else f"{str(kind)[:SHOWN_CHARS]!r} is not known here"
            raise refusal(f"type: {what}; send {CREATE}.", "type", code="unknown_event_type")
        return value

    def _queue_of(self, stream_id: Any) -> _Queue:
        """The queue of the lane that a message names. Raises ServiceError."""
        if stream_id is None:
            return self._default
        if not isinstance(stream_id, str) or not _STREAM_ID.fullmatch(stream_id):
            message = "stream_id: 1 to 256 letters, digits, underscores, hyphens and periods."
            raise refusal(message, "stream_id", code="invalid_stream_id")
        if stream_id not in self._named:
            if len(self._named) == MOST_LANES:
                message = f"stream_id: a connection has {MOST_LANES} at most: use one again."
                raise refusal(message, "stream_id", code="websocket_stream_limit_reached")
            self._named[stream_id] = _Queue(self._make_lane(stream_id))
        return self._named[stream_id]

    async def _serve(self, queue: _Queue) -> None:
        """Answers all messages in the queue, one after another."""
        while queue.waiting:
            message, value = queue.waiting.popleft()
            async with self._room:
                await self._answer(message, value, queue.lane)
            self._socket.answered(message)
        queue.is_served = False

    async def _answer(self, message: Received, value: Json, lane: Lane) -> None:
        """Answers a message. An error is sent to the client, and ends only this response."""
        if not self._is_known():
            self._socket.end(WS_1008_POLICY_VIOLATION, "The key is not valid any more.")
            raise ClientGone
        try:
            if self._socket.is_old:
                raise ServiceError(_OLD)
            await lane.answer(value, message.size_bytes, is_small=message.size_bytes <= SMALL_BODY_BYTES)
        except Exception as error:
            task = asyncio.current_task()
            if (
                task is not None and task.cancelling()
            ):  # cancelled: the error is not an answer, and nothing more may be sent
                raise
            await lane.refuse(error)
