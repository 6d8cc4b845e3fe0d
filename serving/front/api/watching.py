"""GET /v1/kedge/watch: the cluster's state and its events, as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from fastapi.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from serving.front.api.access import FOR_OPERATORS
from serving.front.api.dependencies import OPERATORS_ONLY, Service
from serving.front.api.documented_replies import STREAMED
from serving.front.api.errors import ClientGone, openai_error
from serving.front.api.reply_json import reply_json
from serving.front.api.rules import rules_of
from serving.front.api.service import TurnService
from serving.front.api.sse import KEEP_ALIVE_COMMENT, SEND_PATIENCE_S, STREAM_HEADERS, server_event
from serving.front.api.strict_json import StrictJsonRoute
from serving.front.api.turn_streams import until_disconnect
from serving.wire.turns import ErrorInfo, ServiceError

IntervalS = Annotated[float, Query(ge=0.2, le=60.0)]
MostSessions = Annotated[int, Query(ge=1, le=1000)]
NumStates = Annotated[int, Query(ge=1, le=1_000_000)]


def routes() -> APIRouter:
    router = APIRouter(route_class=StrictJsonRoute, tags=["operations"])
    router.add_api_route(
        "/v1/kedge/watch",
        watch,
        methods=["GET"],
        response_class=Response,
        responses=STREAMED,
        dependencies=OPERATORS_ONLY,
    )
    return router


async def watch(
    request: Request,
    service: Service,
    interval_s: IntervalS = 1.0,
    limit: MostSessions = 100,
    count: NumStates | None = None,
) -> Response:
    """Server-sent events. `state`: at once and then every `interval_s`, with the `limit` sessions that were used last.
    `event`: for each thing that happens; a new stream begins with the most recent ones. Ends after `count` states, if
    given."""
    return WatchStream(service, interval_s, limit, count, request.state.is_known)


class WatchStream(EventSourceResponse):
    """Streams what the service's watch yields. Starts once the watch is accepted, so that a refusal has its own status.
    `is_known` is asked before each event: watching ends when the key is no longer valid."""

    def __init__(
        self,
        service: TurnService,
        interval_s: float,
        limit: int,
        count: int | None,
        is_known: Callable[[], bool],
    ) -> None:
        self._service = service
        self._interval_s = interval_s
        self._limit = limit
        self._count = count
        self._is_known = is_known
        super().__init__((), headers=STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._reply(send, rules_of(scope["app"]).keep_alive_s))
        except ClientGone:
            return

    async def _reply(self, send: Send, keep_alive_s: float) -> None:
        async with self._service.watch(self._interval_s, self._limit) as watched:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            left = self._count
            while left is None or left > 0:
                try:
                    async with asyncio.timeout(keep_alive_s):
                        items = await anext(watched)
                except TimeoutError:
                    await _write(send, KEEP_ALIVE_COMMENT)
                    continue
                except ServiceError as error:
                    await _write(send, _said(error.info))
                    break
                if not self._is_known():
                    await _write(send, _said(FOR_OPERATORS))
                    break
                await _write(send, b"".join(server_event(each.data, each.name) for each in items))
                if left is not None:
                    left -= sum(each.name == "state" for each in items)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, body: bytes) -> None:
    """Raises ClientGone if the client takes nothing."""
    try:
        async with asyncio.timeout(SEND_PATIENCE_S):
            await send({"type": "http.response.body", "body": body, "more_body": True})
    except TimeoutError:
        raise ClientGone from None


def _said(info: ErrorInfo) -> bytes:
    return server_event(reply_json(openai_error(info)), "error")
