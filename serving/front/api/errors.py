"""Errors in the shape of each protocol, and the handlers that give every failed request such a shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.status import WS_1008_POLICY_VIOLATION
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from serving.front.api.documented_replies import ErrorShape, error_shape
from serving.front.api.strict_json import InvalidBody
from serving.front.refusals import TOO_MANY_LOSSES
from serving.logs.access_log import path_in
from serving.settings.strict_settings import NAME_PATTERN
from serving.wire.errors import error_info
from serving.wire.turns import ErrorInfo, ServiceError

CLIENT_CLOSED_REQUEST = 499
UNSUPPORTED = "unsupported_field"
"""Code of an error about something that is known but not served; also the type of pydantic's errors for such values."""

NO_RETRY_HELPS = frozenset(
    {
        "ambiguous_history",
        "history_differs",
        "idempotency_conflict",
        "model_changed",
        "session_is_tree",
        "settings_refused",
        "turn_differs",
        TOO_MANY_LOSSES.code,  # each try would cost four more replicas
    }
)
"""Codes of refusals that stay however often the same request is sent. SDKs send a request with a 409 or a 5xx again
unless a header says not to."""
SHOULD_RETRY = "x-should-retry"

_TOO_MANY = HTTPStatus.TOO_MANY_REQUESTS
_ABOUT_THE_CALLER = frozenset({_TOO_MANY, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_MAX_NAME_LEN = 120
_DENIAL = "websocket.http.response"
"""The ASGI extension that allows an HTTP response to the handshake of a WebSocket."""
_STARTS = frozenset({"http.response.start", f"{_DENIAL}.start", "websocket.accept", "websocket.close"})
_NOT_THE_BODY = frozenset({"model_type", "model_attributes_type", "dict_type", "missing"})

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


def refusal(
    message: str, param: str | None, *, status: int = 400, code: str = "invalid_request"
) -> ServiceError:
    """An error that the client made in field `param`, to be raised."""
    return ServiceError(ErrorInfo(status, code, message, param))


def openai_error(info: ErrorInfo) -> dict[str, Any]:
    """The body of an OpenAI error."""
    if info.status == _TOO_MANY:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if info.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": info.message, "type": kind, "param": info.param, "code": info.code}}


def session_error(info: ErrorInfo) -> dict[str, Any]:
    """The body of a session protocol error. `code` and `param` are Kedge's additions; clients read `message`."""
    return {"error": {"message": info.message, "code": info.code, "param": info.param}}


_MESSAGES_KINDS = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)


_NO_THREADS = MappingProxyType({"error_code": "thread_unsupported_request", "unsupported": ["thread"]})
"""Tells a client that tries threads unasked, as Anthropic's tool runner does, to send the whole history instead."""


def messages_error(info: ErrorInfo) -> dict[str, Any]:
    """The body of an error of Anthropic's protocol, which can name a field only in its message."""
    other = "invalid_request_error" if info.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    named = info.param is None or info.param in info.message
    message = info.message if named else f"{info.param}: {info.message}"
    error: dict[str, Any] = {"type": _MESSAGES_KINDS.get(info.status, other), "message": message}
    if (info.code, info.param) == (UNSUPPORTED, "thread"):
        error["details"] = dict(_NO_THREADS)
    return {"type": "error", "error": error, "request_id": f"req_{uuid4().hex}"}


def error_response(scope: Scope, info: ErrorInfo) -> Response:
    """The error in the shape of the protocol that the call's path belongs to."""
    path = path_in(scope)
    status = info.status
    if (
        not error_shape(path).has_statuses
        and status < HTTPStatus.INTERNAL_SERVER_ERROR
        and status not in _ABOUT_THE_CALLER
    ):
        status = HTTPStatus.BAD_REQUEST
    return _in_shape(path, info, status)


def _in_shape(path: str, info: ErrorInfo, status: int) -> Response:
    headers = retry_headers(info)
    body = _body(path, info)
    if "request_id" in body:
        headers["request-id"] = body["request_id"]
    return JSONResponse(body, status, headers)


def retry_headers(info: ErrorInfo) -> dict[str, str]:
    """The headers that say when to try again, if that is known, or that it is of no use."""
    if info.code in NO_RETRY_HELPS:
        return {SHOULD_RETRY: "false"}
    if info.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(info.retry_after_s)))}


def _body(path: str, info: ErrorInfo) -> dict[str, Any]:
    match error_shape(path):
        case ErrorShape.MESSAGES:
            return messages_error(info)
        case ErrorShape.OPENAI:
            return openai_error(info)
        case ErrorShape.SESSION:
            return session_error(info)


def field_path(location: Sequence[int | str]) -> str | None:
    """The place of a validation error, such as `messages[0].content`; None for the body as a whole.

    Tags of unions are written in angle brackets and dictionary keys as `[key]`: neither is a field.
    """
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(("<", "[")):
            path += f".{part}" if path else part
    return path[:_MAX_NAME_LEN] or None


def validation_info(error: Mapping[str, Any]) -> ErrorInfo:
    """Which field is wrong, and what is wrong with it. `error` is one of pydantic's."""
    param = field_path(error["loc"])
    message, code = _explain(error)
    return ErrorInfo(400, code, message if param is None else f"{param}: {message}", param)


def _explain(error: Mapping[str, Any]) -> tuple[str, str]:
    match error["type"]:
        case "extra_forbidden":
            return "This field is not known here.", "unknown_field"
        case "none_required":
            return "This field is not supported; leave it out.", "unsupported_field"
        case kind if kind == UNSUPPORTED:
            return f"{error['msg']}.", UNSUPPORTED
        case "string_pattern_mismatch" if error["ctx"]["pattern"] == NAME_PATTERN:
            return "Use 1 to 256 visible ASCII characters, no spaces.", "invalid_request"
        case "value_error":
            return str(error["ctx"]["error"]), "invalid_request"
        case kind if kind in _NOT_THE_BODY and len(error["loc"]) == 1:
            return "Send a JSON object, with content-type application/json.", "invalid_request"
    return str(error["msg"]) + ".", "invalid_request"


async def refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a call, or the handshake of a WebSocket that is not accepted yet, with the response. If the server cannot
    send a response to a handshake, the WebSocket is closed."""
    if scope["type"] == "websocket" and _DENIAL not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": WS_1008_POLICY_VIOLATION, "reason": ""})
    else:
        await response(scope, receive, send)


def said_of(error: Exception) -> ErrorInfo:
    """What a client is told of any error."""
    match error:
        case RequestValidationError() | WebSocketRequestValidationError():
            return validation_info(error.errors()[0])
        case InvalidBody():
            return validation_info(error.error)
        case HTTPException():
            return ErrorInfo(error.status_code, _code_of(error.status_code), str(error.detail))
    return error_info(error)


def _code_of(status: int) -> str:
    """Python 3.13 has another name for 413 than 3.12."""
    return "request_entity_too_large" if status == 413 else HTTPStatus(status).name.lower()


async def _on_error(connection: Request | WebSocket, error: Exception) -> Response | None:
    """For a WebSocket, only before it is accepted: later errors are sent as messages."""
    response = error_response(connection.scope, said_of(error))
    if isinstance(connection, Request):
        return response
    await refuse(response, connection.scope, connection.receive, connection.send)
    return None


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    info = said_of(error)
    response = _in_shape(path_in(request.scope), info, info.status)
    response.headers.update(error.headers or {})
    return response


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class UnexpectedErrors:
    """ASGI middleware, the last safety net: an unexpected error is logged and answered with a 500 in the protocol's
    shape.

    It leaves its own `send` in the scope (`scope["state"]["send_body"]`). A stream sends its start through all layers,
    as they need to know that the answer has begun, and what follows through this: each layer between costs every token
    a call.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["send_body"] = send
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] in _STARTS
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except Exception as error:
            logger.exception("%s %s failed", scope.get("method", "WebSocket"), scope["path"])
            if started:
                raise
            await refuse(error_response(scope, error_info(error)), scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Maps every way in which a request can fail to its protocol's shape."""
    for kind in (ServiceError, RequestValidationError, WebSocketRequestValidationError, InvalidBody):
        app.add_exception_handler(kind, _on_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_middleware(UnexpectedErrors)
