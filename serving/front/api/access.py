"""Who may call: whoever has a key, if there are any; and what is for operators only."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.front.api.errors import error_response, refuse
from serving.front.api.keys import ANYBODY, Caller, KeyRing
from serving.logs.audit_log import audit_event
from serving.wire.turns import ErrorInfo

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""For load balancers and Prometheus, which tell nothing of what sessions say."""

CONSOLE_PATH = "/console"
"""The console's own files are for everybody, too: what they show comes from calls that need a key."""

ONCE = frozenset(
    {"authorization", "host", "idempotency-key", "origin", "x-api-key", "x-session-id", "x-tenant-id"}
)
"""Headers that say who calls, and for what. Of two a proxy may check the one and this server heed the other."""

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
    """ASGI middleware: says whose call it is (`scope["state"]["caller"]`). Calls without one of the keys are refused
    before anything of theirs is read, handshakes of WebSockets likewise. `find_caller`, beside it, looks again, for
    those that last. Without `operators` nobody is one here."""

    def __init__(self, app: ASGIApp, keys: KeyRing, *, operators: bool) -> None:
        self._app = app
        self._keys = keys
        self._operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        find_caller = partial(self._caller, scope["path"], Headers(scope=scope))
        caller = find_caller()
        if isinstance(caller, Caller):
            scope.setdefault("state", {}).update(caller=caller, find_caller=find_caller)
            await self._app(scope, receive, send)
            return
        response = error_response(scope["path"], caller)
        if caller is REFUSED:
            audit_event("key_refused", level=logging.WARNING, path=scope["path"], client=_address_in(scope))
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
    """Of a proxy, where there is one."""
    client = scope.get("client")
    return None if client is None else str(client[0])


def _key_in(headers: Headers) -> str | None:
    """Anthropic's clients have a header of their own for it. What `authorization` says, counts."""
    authorization = headers.get("authorization")
    if authorization is None:
        return headers.get("x-api-key")
    scheme, _, given = authorization.partition(" ")
    return given if scheme.lower() == "bearer" else None


def _twice(headers: Headers) -> str | None:
    counted = Counter(name for name in headers.keys() if name in ONCE)  # noqa: SIM118 - keys are there as often as sent
    return next((name for name, count in counted.items() if count > 1), None)
