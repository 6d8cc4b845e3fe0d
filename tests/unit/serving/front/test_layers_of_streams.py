"""What a stream sends after its start passes no layer of the application that does not need to see it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.api.sse import TurnEventStream
from serving.front.http import create_http_app
from tests.unit.serving.front.streamed_requests import STREAMED
from tests.unit.serving.local_service import MODEL, http_server, local_service

WRITES = TurnEventStream._write.__code__


def layers_between() -> list[str]:
    """The modules of the functions between the caller of this one and the stream's `_write`, the outermost first."""
    frame, modules = sys._getframe(2), []
    while frame is not None and frame.f_code is not WRITES:
        modules.append(frame.f_globals["__name__"])
        frame = frame.f_back
    return modules


@pytest.mark.parametrize("path", STREAMED)
async def test_what_follows_the_start_passes_one_layer_of_starlette(tmp_path: Path, path: str) -> None:
    layers: dict[str, list[list[str]]] = {"http.response.start": [], "http.response.body": []}
    body = STREAMED[path] | {"stream": True} | ({} if path == "/generate" else {"model": MODEL.model_id})
    async with local_service(tmp_path) as service:
        app = create_http_app(lambda: service)

        async def noted(scope: Any, receive: Any, send: Any) -> None:
            async def note(message: Any) -> None:
                layers[message["type"]].append(layers_between())
                await send(message)

            await app(scope, receive, note)

        async with http_server(noted) as url, httpx.AsyncClient(base_url=url) as client:
            assert (await client.post(path, json=body)).status_code == 200
    (start,) = layers["http.response.start"]
    assert "serving.front.api.errors" in start
    assert all(each == ["starlette.middleware.errors"] for each in layers["http.response.body"])
