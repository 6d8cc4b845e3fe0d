"""The span of an HTTP request at a front end, which is the parent of its turns' spans."""

from __future__ import annotations

from collections.abc import Awaitable, Set
from http import HTTPStatus

from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.logs.access_log import path_in, route_of
from serving.logs.call_facts import CALL_FACTS
from serving.trace.open_span import Current, OpenSpan, RequestNow
from serving.trace.spans import Spans, is_kept, trace_id_of

_STARTS = frozenset({"http.response.start", "websocket.http.response.start"})


class RequestsTraced:
    """ASGI middleware inside RequestsKnown. Calls of `passed_over` paths, which come every second, get no span."""

    def __init__(self, app: ASGIApp, spans: Spans, *, passed_over: Set[str]) -> None:
        self._app = app
        self._spans = spans
        self._passed_over = passed_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or path_in(scope) in self._passed_over:
            await self._app(scope, receive, send)
            return
        name, parent = self._spans.named_in(self._spans.parent_in(Headers(scope=scope)))
        facts = CALL_FACTS.get()
        if facts is not None:
            facts.trace_id = trace_id_of(name)
        if not is_kept(name):
            with Current(RequestNow(name, None)):
                await self._app(scope, receive, send)
            return
        method = scope.get("method", "WEBSOCKET")
        attributes = {"http.request.method": method, "url.path": scope["path"]}
        if facts is not None:
            attributes["kedge.request_id"] = facts.request_id
        span = self._spans.begin(method, name, parent, kind=SpanKind.SERVER, attributes=attributes)
        with Current(RequestNow(name, span.start_ns)):
            try:
                await self._app(scope, receive, _noting_status(span, send))
            except Exception as error:
                span.raised(error)
                raise
            finally:
                route = route_of(scope)
                span.title = f"{method} {route}"
                span.attributes["http.route"] = route
                span.end()


def _noting_status(span: OpenSpan, send: Send) -> Send:
    def note_and_send(message: Message) -> Awaitable[None]:
        if message["type"] in _STARTS:
            status = message["status"]
            span.attributes["http.response.status_code"] = status
            if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                span.fail(str(status))
        return send(message)

    return note_and_send
