"""A caller without a valid key gets nothing, except on the paths for load balancers and Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from serving.app import build
from serving.cli.main import app as command
from serving.front.api.access import OPEN_PATHS
from serving.front.http import create_http_app
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from serving.settings.strict_settings import SettingsError
from tests.unit.serving.local_service import MODEL, LocalService, client_of
from tests.unit.serving.sdk_clients import http_at, openai_at

KEYS = ("first-key", "schlüssel")
OPERATOR = "operators-key"
RING = KeyRing({API_KEYS: ",".join(KEYS), OPERATOR_KEYS: OPERATOR})
ASKED = {"model": MODEL.model_id, "prompt": [5], "max_tokens": 2}


@pytest.fixture
def app_options() -> dict[str, Any]:
    return {"keys": RING}


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer first",
        "Bearer first-key2",
        "Bearer first-key,schlüssel",
        "Basic first-key",
        "first-key",
    ],
)
async def test_calls_without_a_key_are_refused(client: httpx.AsyncClient, given: str | None) -> None:
    headers = [] if given is None else [(b"authorization", given.encode())]
    reply = await client.post("/v1/completions", content=b"{no json", headers=headers)
    assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_api_key", "authorization")
    assert error["type"] == "invalid_request_error"
    reply = await client.post("/generate", json={"input_ids": [5]}, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("given", ["Bearer first-key", "bearer first-key ", "Bearer schlüssel"])
async def test_any_of_the_keys_will_do(client: httpx.AsyncClient, given: str) -> None:
    reply = await client.post("/v1/completions", json=ASKED, headers=[(b"authorization", given.encode())])
    assert reply.status_code == 200, reply.text


async def test_every_other_path_is_shut(service: LocalService) -> None:
    app = create_http_app(service, keys=RING)
    paths = set(app.openapi()["paths"]) | {"/docs", "/openapi.json", "/nothing", "/health/", "/metrics/x"}
    assert paths > OPEN_PATHS
    async with client_of(app) as client:
        for path in paths:
            status = (await client.get(path.replace("{session_id}", "s"))).status_code
            assert (status == 401) == (path not in OPEN_PATHS), (path, status)


async def test_the_openai_client_has_a_key(url: str) -> None:
    async with openai_at(url, "wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="Send a key"):
            await client.completions.create(**ASKED)
    async with openai_at(url, KEYS[0]) as client:
        stream = await client.completions.create(**ASKED, stream=True)
        assert [chunk async for chunk in stream]


@pytest.mark.parametrize(
    "arguments",
    [
        ["sessions"],
        ["sessions", "fork", "s", "--at", "0"],
        ["audit"],
        ["chat"],
        ["bench", "--sessions", "1", "--turns", "1", "--warmup", "0", "--max-other-cores", "99"],
    ],
)
async def test_commands_send_the_key(url: str, arguments: list[str]) -> None:
    def run(key: str | None) -> tuple[int, str]:
        environment = {"KEDGE_URL": url, "KEDGE_API_KEY": key}
        # `fork` is a subcommand of `kedge sessions`, which takes the url.
        result = CliRunner().invoke(command, arguments, env=environment, input="hello\n")
        return result.exit_code, result.output

    headers = {"authorization": f"Bearer {OPERATOR}"}
    async with http_at(url, headers=headers) as client:
        assert (await client.post("/v1/kedge/sessions", json={"session_id": "s"})).is_success
    status, told = await asyncio.to_thread(run, None)
    assert status == 1
    assert "401: Send a key that is valid here" in " ".join(told.split())
    status, told = await asyncio.to_thread(run, OPERATOR)
    assert "401:" not in told
    assert status in ((0, 3) if arguments[0] == "bench" else (0,)), told


def test_an_application_is_not_built_without_the_keys_that_it_is_to_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(API_KEYS, " , ")
    with pytest.raises(SettingsError, match=API_KEYS):
        build({"model": {"path": "assets/models/kedge-chat"}})
