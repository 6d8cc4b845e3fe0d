"""A short request of each protocol that streams, by path, without `stream` and `model`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
from fastapi import FastAPI

from tests.unit.serving.local_service import MODEL, http_server
from tests.unit.serving.sdk_clients import http_at

PATHS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a dog", "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"prompt": "a dog", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a dog"}], "max_tokens": 4},
}

STREAMED: dict[str, dict[str, Any]] = PATHS | {
    "/v1/messages": {"messages": [{"role": "user", "content": "a dog"}], "max_tokens": 4},
    "/v1/responses": {"input": "a dog", "max_output_tokens": 16, "store": False},
}


async def streamed(app: FastAPI, path: str, note: Callable[[Any], None]) -> httpx.Response:
    """The reply to the request of this path, streamed. `note` gets each message that the application sends."""

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        async def send_noted(message: Any) -> None:
            note(message)
            await send(message)

        await app(scope, receive, send_noted)

    body = STREAMED[path] | {"stream": True} | ({} if path == "/generate" else {"model": MODEL.model_id})
    served: Any = noted
    async with http_server(served) as url, http_at(url) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200
    return reply
