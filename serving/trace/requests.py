"""The span of an HTTP request at a front end, which is the parent of its turns'."""

from __future__ import annotations

from collections.abc import Set
from http import HTTPStatus

from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.logs.access_log import route_of
from serving.logs.call_facts import CALL_FACTS
from serving.trace.spans import Spans, fail, trace_id_of

_STARTS = frozenset({"http.response.start", "websocket.http.response.start"})


class RequestsTraced:
    """ASGI middleware within RequestsKnown. Calls of `passed_over` paths, which come every second, have no span."""

    def __init__(self, app: ASGIApp, spans: Spans, *, passed_over: Set[str]) -> None:
        self._app = app
        self._spans = spans
        self._passed_over = passed_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in self._passed_over:
            await self._app(scope, receive, send)
            return
        method = scope.get("method", "WEBSOCKET")
        with self._spans.tracer.start_as_current_span(
            method,
            context=self._spans.parent_in(Headers(scope=scope)),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": scope["path"]},
        ) as span:
            facts = CALL_FACTS.get()
            if facts is not None:
                facts.trace_id = trace_id_of(span)
                span.set_attribute("kedge.request_id", facts.request_id)
            try:
                await self._app(scope, receive, _noting_status(span, send))
            finally:
                route = route_of(scope)
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)


def _noting_status(span: Span, send: Send) -> Send:
    async def note_and_send(message: Message) -> None:
        if message["type"] in _STARTS:
            status = message["status"]
            span.set_attribute("http.response.status_code", status)
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                fail(span, str(status))
        await send(message)

    return note_and_send
