"""Who may call: whoever has a key, if there are any. Keys come from the environment, since Ray logs settings."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.front.api.errors import error_response
from serving.settings.strict_settings import SettingsError
from serving.wire.turns import ErrorInfo

API_KEYS = "KEDGE_API_KEYS"
"""The environment variable of the ingress that has them, with commas between them."""

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""For load balancers and Prometheus, which tell nothing of what sessions say."""

REFUSED = ErrorInfo(
    401, "invalid_api_key", "Send a key that is valid here: authorization: Bearer <key>.", "authorization"
)


def keys_in(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Where the variable is not set everybody may call. Raises SettingsError where it is set and has no key: whoever
    sets it wants calls refused."""
    value = environment.get(API_KEYS)
    if value is None:
        return ()
    keys = tuple(key for part in value.split(",") if (key := part.strip()))
    if not keys:
        raise SettingsError(
            f"{API_KEYS} is set but has no key in it: give at least one key (commas part them), or leave the "
            "variable unset so that everybody may call"
        )
    return keys


class KeysRequired:
    """ASGI middleware: calls without one of the keys are refused before anything of theirs is read."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        response = error_response(scope["path"], REFUSED)
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        """Takes equally long for every wrong key."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", "replace")
        return scheme.lower() == "bearer" and any(hmac.compare_digest(key, known) for known in self._keys)
