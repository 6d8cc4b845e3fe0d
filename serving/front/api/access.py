"""Who may call: whoever has a key, if there are any; and what is for operators only."""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.front.api.errors import error_response
from serving.front.api.keys import ANYBODY, Caller, KeyRing
from serving.wire.turns import ErrorInfo

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""For load balancers and Prometheus, which tell nothing of what sessions say."""

ONCE = frozenset({"authorization", "host", "idempotency-key", "origin", "x-session-id", "x-tenant-id"})
"""Headers that say who calls, and for what. Of two a proxy may check the one and this server heed the other."""

REFUSED = ErrorInfo(
    HTTPStatus.UNAUTHORIZED,
    "invalid_api_key",
    "Send a key that is valid here: authorization: Bearer <key>.",
    "authorization",
)
FOR_OPERATORS = ErrorInfo(
    HTTPStatus.FORBIDDEN, "operator_only", "This is for operators: send an operator's key.", "authorization"
)


class CallersKnown:
    """ASGI middleware: says whose call it is (`scope["state"]["caller"]`). Calls without one of the keys are refused
    before anything of theirs is read."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        twice = _twice(headers)
        caller = None if twice else self._caller(headers)
        if caller is None and scope["path"] in OPEN_PATHS and not twice:
            caller = Caller()
        if caller is not None:
            scope.setdefault("state", {})["caller"] = caller
            await self._app(scope, receive, send)
            return
        response = error_response(scope["path"], REFUSED if twice is None else _refusal_of_two(twice))
        if twice is None:
            response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller | None:
        if not self._keys:
            return ANYBODY
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace")
        return self._keys.caller(key) if scheme.lower() == "bearer" else None


def _twice(headers: Headers) -> str | None:
    counted = Counter(name for name in headers.keys() if name in ONCE)  # noqa: SIM118 - keys are there as often as sent
    return next((name for name, count in counted.items() if count > 1), None)


def _refusal_of_two(name: str) -> ErrorInfo:
    return ErrorInfo(HTTPStatus.BAD_REQUEST, "duplicate_header", f"{name}: send this header once.", name)
