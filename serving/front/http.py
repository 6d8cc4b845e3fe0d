"""The HTTP application: every protocol on the same sessions."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from serving.front.api import admin, openai_chat, openai_completions, openai_models, session_protocol
from serving.front.api.access import KeysRequired
from serving.front.api.errors import install_error_handlers
from serving.wire.turns import TurnService

MAX_BODY_SIZE_BYTES = 32 * 1024 * 1024
KEEP_ALIVE_S = 5.0


def create_http_app(
    service_provider: Callable[[], TurnService],
    *,
    api_keys: tuple[str, ...] = (),
    max_body_size_bytes: int = MAX_BODY_SIZE_BYTES,
    keep_alive_s: float = KEEP_ALIVE_S,
) -> FastAPI:
    """`service_provider` is called for each request, so that the service may come up after the application. With
    `api_keys` calls need one of them. A stream is silent for `keep_alive_s` at most."""
    app = FastAPI(title="Kedge", summary="Session-native serving of large language models")
    app.state.service_provider = service_provider
    app.state.max_body_size_bytes = max_body_size_bytes
    app.state.keep_alive_s = keep_alive_s
    install_error_handlers(app)
    for protocol in (openai_chat, openai_completions, openai_models, session_protocol, admin):
        app.include_router(protocol.routes())
    if api_keys:
        app.add_middleware(KeysRequired, keys=api_keys)
    return app
