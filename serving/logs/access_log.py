"""A request's id, which its reply carries too, and its line in the access log."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.logs.call_facts import CALL_FACTS, CallFacts
from serving.settings.record_args import LogsArgs

access_logger = logging.getLogger("kedge.access")

REQUEST_ID = "x-request-id"
LONGEST_ID = 256
_CLOSED_EARLY = 499
"""nginx's status for a client that left before the answer."""
_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens")
_NO_ROUTE = "-"


class RequestsKnown:
    """The outermost ASGI middleware. It sets the request's CALL_FACTS, puts the request's id into the reply (with
    `tells_id`; otherwise Ray Serve does), and logs the request when its answer has ended."""

    def __init__(self, app: ASGIApp, args: LogsArgs, *, tells_id: bool) -> None:
        self._app = app
        self._args = args
        self._tells_id = tells_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        facts = CallFacts(request_id=given[:LONGEST_ID] or uuid.uuid4().hex, keeps_content=self._args.content)
        answer = _Answer(send, facts.request_id if self._tells_id else None)
        began_s = time.perf_counter()
        token = CALL_FACTS.set(facts)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            if self._args.access != "off":
                self._log(scope, facts, answer, time.perf_counter() - began_s)
            CALL_FACTS.reset(token)

    def _log(self, scope: Scope, facts: CallFacts, answer: _Answer, took_s: float) -> None:
        failed = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        if self._args.access == "errors" and not failed:
            return
        method, route = scope.get("method", "WEBSOCKET"), route_of(scope)
        fields: dict[str, Any] = {
            "method": method,
            "route": route,
            "status": answer.status,
            "duration_ms": round(took_s * 1000, 1),
            "response_bytes": answer.num_bytes,
        }
        if not facts.session_id:
            facts.session_id = scope.get("path_params", {}).get("session_id", "")
        if facts.turns:
            fields |= {name: getattr(facts, name) for name in _TOKENS}
        if facts.keeps_content and facts.turns:
            fields |= {"prompt": facts.said, "answer": facts.answer}
        access_logger.log(
            logging.ERROR if failed else logging.INFO,
            "%s %s %d %.1f ms",
            method,
            route,
            answer.status,
            took_s * 1000,
            extra=fields | {"log_to_stderr": False},
        )


class _Answer:
    """Passes the answer to the client, and notes its status and size."""

    def __init__(self, send: Send, told_id: str | None) -> None:
        self._send = send
        self._told_id = told_id
        self.status = _CLOSED_EARLY
        self.num_bytes = 0

    def send(self, message: Message) -> Awaitable[None]:
        kind = message["type"]
        if kind in _STARTS:
            self.status = message.get("status", HTTPStatus.SWITCHING_PROTOCOLS)
            if self._told_id is not None:
                MutableHeaders(scope=message)[REQUEST_ID] = self._told_id
        elif kind == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
        elif kind == "websocket.send":
            self.num_bytes += len(message.get("bytes") or message.get("text") or b"")
        return self._send(message)


def path_in(scope: Scope) -> str:
    """The request's path in the application. Ray Serve leaves the application's `route_prefix` in the scope's path, and
    says in `root_path` what it is."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    below = path.removeprefix(prefix)
    return below if not below or below.startswith("/") else path


def route_of(scope: Scope) -> str:
    """The path template of the request's route, which has no ids in it; "-" if no route matched."""
    route = scope.get("route")
    return str(getattr(route, "path", _NO_ROUTE))
