"""Headers that Ray Serve would read before Kedge does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    parse_disconnect_disabled_header,
    parse_request_timeout_header,
    validate_http_proxy_callback_return,
)
from ray.serve._private.utils import call_function_from_import_path
from starlette.responses import JSONResponse

from serving.front.ray_headers import IMPORT_PATH


async def _as_ray_reads_it(scope: Any, receive: Any, send: Any) -> None:
    headers = dict(scope["headers"])
    told = {
        "request_id": headers[b"x-request-id"].decode(),
        "trace": headers.get(b"traceparent", b"").decode(),
        "timeout_s": parse_request_timeout_header(headers, None),
        "deaf": parse_disconnect_disabled_header(headers),
        "names": sorted(name.decode() for name in headers),
    }
    await JSONResponse(told)(scope, receive, send)


async def _sent(path: str, headers: dict[str, bytes]) -> httpx.Response:
    """Sends a request through what Ray Serve puts around an application. The middleware that it loads by our name is
    outermost."""
    app: Any = RequestIdMiddleware(_as_ray_reads_it)
    for middleware in validate_http_proxy_callback_return(call_function_from_import_path(IMPORT_PATH)):
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers=headers)


@pytest.mark.parametrize("name", ["x-request-id", "traceparent", "tracestate"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/generate"])
async def test_bytes_that_ray_cannot_read_are_a_400_that_names_the_header(path: str, name: str) -> None:
    reply = await _sent(path, {name: b"\xff\xfe"})
    assert reply.status_code == 400
    assert name in reply.json()["error"]["message"]


async def test_a_name_for_the_request_and_its_trace_go_through() -> None:
    reply = await _sent("/v1/models", {"x-request-id": "grüße".encode(), "traceparent": b"00-1-2-01"})
    assert reply.json()["request_id"] == "grüße"
    assert reply.json()["trace"] == "00-1-2-01"
    assert reply.headers["x-request-id"] == "grüße"


async def test_nobody_orders_anything_of_ray() -> None:
    """With these headers a call would end in Ray's own 408, or its turn would run on after its client has left."""
    orders = {
        "x-request-timeout-seconds": b"0.001",
        "x-request-disconnect-disabled": b"?1",
        "serve_multiplexed_model_id": b"\xff",
        "Serve-Multiplexed-Model-Id": b"\xff",
        "x-ray-session-id": b"\xff",
    }
    told = (await _sent("/v1/models", orders)).json()
    assert told["timeout_s"] is None
    assert told["deaf"] is False
    assert not {"serve_multiplexed_model_id", "serve-multiplexed-model-id", "x-ray-session-id"} & {
        *told["names"]
    }
