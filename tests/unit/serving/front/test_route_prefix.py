"""An application with a `route_prefix`. Ray Serve leaves the prefix in the path, and says in `root_path` what it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.api.access import OPEN_PATHS
from serving.front.http import create_http_app
from serving.keys import API_KEYS, KeyRing
from serving.logs.access_log import path_in
from tests.unit.serving.local_service import MODEL, http_server, local_service
from tests.unit.serving.sdk_clients import http_at

RING = KeyRing({API_KEYS: "k"})
KEY = {"authorization": "Bearer k"}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        local_service(tmp_path) as service,
        http_server(create_http_app(service, keys=RING), root_path="/llm") as url,
        http_at(url, timeout=30.0) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("path", "prefix", "expected"),
    [
        ("/health", "", "/health"),
        ("/llm/health", "/llm", "/health"),
        ("/llm/health", "/llm/", "/health"),
        ("/a/llm/v1/models", "/a/llm", "/v1/models"),
        ("/llm", "/llm", ""),
        ("/llm/", "/llm", "/"),
        ("/llms/health", "/llm", "/llms/health"),
        ("/health", "/llm", "/health"),
    ],
)
def test_the_path_in_the_application(path: str, prefix: str, expected: str) -> None:
    assert path_in({"path": path, "root_path": prefix}) == expected


async def test_probes_scrapes_and_the_console_need_no_key(client: httpx.AsyncClient) -> None:
    """They were refused with 401."""
    for path in (*OPEN_PATHS, "/console", "/console/main.js"):
        assert (await client.get(path)).status_code == 200, path
    for path in ("/v1/models", "/", "/llm/health", "/v1/kedge/sessions", "/healthy"):
        assert (await client.get(path)).status_code == 401, path
        assert (await client.get(path, headers=KEY)).status_code != 401, path


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_a_probe_may_ask_for_the_head_alone(client: httpx.AsyncClient, path: str) -> None:
    """As `wget --spider`, `curl -I` and some load balancers do. It was answered 405."""
    reply = await client.head(path)
    assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize("headers", [{}, KEY])
async def test_errors_have_their_protocols_shape(client: httpx.AsyncClient, headers: Any) -> None:
    """All of them had the shape of the session protocol."""
    status = 400 if headers else 401
    reply = await client.post("/v1/messages", json={}, headers=headers)
    assert (reply.status_code, reply.json()["type"]) == (status, "error")
    reply = await client.post("/v1/chat/completions", json={}, headers=headers)
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, "invalid_request_error")
    reply = await client.post("/generate", json={}, headers=headers)
    assert (reply.status_code, set(reply.json()["error"])) == (status, {"message", "code", "param"})


async def test_errors_keep_their_own_status(client: httpx.AsyncClient) -> None:
    """Only the session protocol answers all of a client's mistakes with 400."""
    reply = await client.get("/v1/kedge/sessions/nobody", headers=KEY)
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "invalid_request_error")
    body = {"model": MODEL.model_id, "prompt": [5], "max_tokens": 2}
    assert (await client.post("/v1/completions", json=body, headers=KEY)).status_code == 200
