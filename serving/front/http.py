"""The HTTP application: all protocols, working on the same sessions."""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute

from serving.front.api import admin, console, watching
from serving.front.api.access import CallersKnown
from serving.front.api.browsers import NO_RULES, BrowserCallsChecked, BrowserRules
from serving.front.api.counted import RequestMetrics, RequestsCounted
from serving.front.api.errors import SHOULD_RETRY, install_error_handlers
from serving.front.api.ignored_fields import IGNORED_FIELDS
from serving.front.api.messages import routes as messages
from serving.front.api.openai import chat, completions, models, tokenization
from serving.front.api.responses import conversations, websocket
from serving.front.api.responses import routes as responses
from serving.front.api.responses.background import BackgroundResponses
from serving.front.api.rules import ApiRules
from serving.front.api.service import TurnService
from serving.front.api.sessions import protocol as session_protocol
from serving.front.api.sessions import routes as sessions
from serving.front.api.sockets import MOST_SOCKETS, Sockets
from serving.front.api.turn_headers import REPLAYED, TURN_INDEX
from serving.front.recorder import Recorder
from serving.keys import KeyRing
from serving.logs.access_log import REQUEST_ID

NO_KEYS = KeyRing({})
DEFAULT_RULES = ApiRules()
NO_RECORDER = Recorder()
PROTOCOLS = (
    chat,
    completions,
    models,
    responses,
    websocket,
    conversations,
    messages,
    session_protocol,
    tokenization,
    sessions,
    admin,
    watching,
)


def create_http_app(
    service: TurnService,
    *,
    keys: KeyRing = NO_KEYS,
    rules: ApiRules = DEFAULT_RULES,
    max_websockets: int = MOST_SOCKETS,
    browser_rules: BrowserRules = NO_RULES,
    operators: bool = True,
    background: BackgroundResponses | None = None,
    metrics: RequestMetrics | None = None,
    recorder: Recorder = NO_RECORDER,
) -> FastAPI:
    """The HTTP application.

    If there are `keys`, calls need one of them. Without `operators`, calls that are for operators are refused.
    `background`: the responses that run after their requests have returned; the caller stops them. With None there are
    no other front ends, and these responses end with the process. `metrics` counts the requests; `recorder` logs and
    traces them.
    """
    app = FastAPI(title="Kedge", summary="Session-native serving of large language models")
    app.state.service = service
    app.state.rules = rules
    app.state.background = background or BackgroundResponses()
    app.state.sockets = Sockets(max_websockets)
    install_error_handlers(app)
    app.router.routes += _protocol_routes()
    if operators:
        app.router.routes += console.routes().routes
    app.add_middleware(CallersKnown, keys=keys, operators=operators)
    _add_outer_middleware(app, browser_rules, keyless=not keys, metrics=metrics)
    recorder.install(app)
    return app


@cache
def _protocol_routes() -> tuple[BaseRoute, ...]:
    """The routes of all protocols. They hold nothing between requests, so all applications of a process share them:
    making them takes 0.2 s. A router that is included would make each of them again at its first request, and look
    them up in two steps."""
    return tuple(route for protocol in PROTOCOLS for route in protocol.routes().routes)


def _add_outer_middleware(
    app: FastAPI, browser_rules: BrowserRules, *, keyless: bool, metrics: RequestMetrics | None
) -> None:
    """Each layer wraps those added before it. Refused requests are counted, too."""
    app.add_middleware(BrowserCallsChecked, rules=browser_rules, keyless=keyless)
    if browser_rules.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=browser_rules.origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=(TURN_INDEX, REPLAYED, IGNORED_FIELDS, REQUEST_ID, "retry-after", SHOULD_RETRY),
        )
    if metrics is not None:
        app.add_middleware(RequestsCounted, metrics=metrics)
