"""Headers that Ray Serve reads before Kedge does, in its proxy and in the process of an ingress.

Ray decodes some headers as UTF-8; if their bytes are not UTF-8, it answers with a plain 500. Other headers give orders
to Ray Serve: to end a call after some time with a plain 408, or to let a turn run on after its client has left. Kedge
takes no such orders.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.front.api.errors import error_response
from serving.wire.turns import ErrorInfo

IMPORT_PATH = f"{__name__}:middlewares"
"""For RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH."""

READ_BY_RAY = frozenset({b"x-request-id", b"traceparent", b"tracestate"})
ORDERS_TO_RAY = frozenset(
    {
        b"serve-multiplexed-model-id",
        b"x-ray-session-id",
        b"x-request-disconnect-disabled",
        b"x-request-timeout-seconds",
    }
)
"""Ray also takes some of them with _ in place of -."""


def middlewares() -> list[Middleware]:
    """The middleware. Ray Serve calls this function when it starts to listen."""
    return [Middleware(RayHeadersChecked)]


class RayHeadersChecked:
    """ASGI middleware around Ray Serve's own: drops headers that give orders to Ray, refuses what Ray cannot read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" not in scope:
            await self._app(scope, receive, send)
            return
        kept = [
            (name, value)
            for name, value in scope["headers"]
            if name.lower().replace(b"_", b"-") not in ORDERS_TO_RAY
        ]
        unread = next(
            (name for name, value in kept if name.lower() in READ_BY_RAY and not _is_text(value)), None
        )
        if unread is None or scope["type"] != "http":
            await self._app({**scope, "headers": kept}, receive, send)
            return
        header = unread.decode("ascii").lower()
        refused = ErrorInfo(400, "invalid_request", f"{header}: Its bytes are not UTF-8.", header)
        await error_response(scope, refused)(scope, receive, send)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
