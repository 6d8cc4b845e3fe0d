"""Who may call: if there are keys, only callers with one. And who counts as an operator."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.front.api.errors import error_response, refuse
from serving.keys import ANYBODY, Caller, KeyRing
from serving.logs.access_log import path_in
from serving.logs.audit_log import audit_event
from serving.wire.turns import ErrorInfo

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Open without a key, for load balancers and Prometheus: these tell nothing of what sessions contain."""

CONSOLE_PATH = "/console"
"""The console's files need no key either: what they show comes from calls that need one."""

MOST_PATH_CHARS = 256
"""So much of a path is in the audit log: anybody can send calls that are refused, with paths as long as they like."""

ONCE = frozenset(
    {"authorization", "host", "idempotency-key", "origin", "x-api-key", "x-session-id", "x-tenant-id"}
)
"""Headers that say who calls, and for what; each may be sent once. Of two, a proxy might check the one and this server
use the other."""

REFUSED = ErrorInfo(
    HTTPStatus.UNAUTHORIZED,
    "invalid_api_key",
    "Send a key that is valid here: authorization: Bearer <key>, or x-api-key: <key>.",
    "authorization",
)
FOR_OPERATORS = ErrorInfo(
    HTTPStatus.FORBIDDEN,
    "operator_only",
    "This is for operators: send an operator's key, to the operators' port if there is one.",
    "authorization",
)


class CallersKnown:
    """ASGI middleware: sets who calls (`scope["state"]["caller"]`). Calls and WebSocket handshakes without a valid key
    are refused before their content is read. `is_known`, beside `caller`, looks the key up again, for calls that last:
    whether it is still that caller's. Without `operators` no caller counts as an operator."""

    def __init__(self, app: ASGIApp, keys: KeyRing, *, operators: bool) -> None:
        self._app = app
        self._keys = keys
        self._operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        find_caller = partial(self._caller, path_in(scope), Headers(scope=scope))
        caller = find_caller()
        if isinstance(caller, Caller):
            scope.setdefault("state", {}).update(caller=caller, is_known=lambda: find_caller() == caller)
            await self._app(scope, receive, send)
            return
        response = error_response(scope, caller)
        if caller is REFUSED:
            path = scope["path"][:MOST_PATH_CHARS]
            audit_event("key_refused", level=logging.WARNING, path=path, client=_address_in(scope))
            response.headers["www-authenticate"] = "Bearer"
        await refuse(response, scope, receive, send)

    def _caller(self, path: str, headers: Headers) -> Caller | ErrorInfo:
        caller = self._known(path, headers)
        if self._operators or not isinstance(caller, Caller):
            return caller
        return replace(caller, operator=False)

    def _known(self, path: str, headers: Headers) -> Caller | ErrorInfo:
        if (twice := _twice(headers)) is not None:
            return ErrorInfo(
                HTTPStatus.BAD_REQUEST, "duplicate_header", f"{twice}: send this header once.", twice
            )
        if not self._keys:
            return ANYBODY
        key = _key_in(headers)
        caller = None if key is None else self._keys.caller(key.strip().encode("latin-1", "replace"))
        return caller or (Caller() if _is_open(path) else REFUSED)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path == CONSOLE_PATH or path.startswith(f"{CONSOLE_PATH}/")


def _address_in(scope: Scope) -> str | None:
    """The client's address, or the proxy's if there is one."""
    client = scope.get("client")
    return None if client is None else str(client[0])


def _key_in(headers: Headers) -> str | None:
    """The key that the call sends. Anthropic's clients use x-api-key; `authorization` takes precedence."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key")
    scheme, _, given = authorization.partition(" ")
    return given if scheme.lower() == "bearer" else None


def _twice(headers: Headers) -> str | None:
    counted = Counter(name for name, _ in headers.items() if name in ONCE)
    return next((name for name, count in counted.items() if count > 1), None)
