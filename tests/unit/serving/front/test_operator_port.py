"""The paths for operators on a port of their own."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import pytest

from serving.front.http import create_http_app
from serving.front.operator_port import OperatorPort
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from serving.settings.strict_settings import SettingsError
from tests.unit.serving.local_service import LocalService, client_of
from tests.unit.serving.sdk_clients import http_at

KEYS = {API_KEYS: "key-a=acme", OPERATOR_KEYS: "key-o"}
HOST = "127.0.0.1"
FOR_OPERATORS = "/v1/kedge/audit"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as found:
        return int(found.getsockname()[1])


@pytest.mark.parametrize("ring", [KeyRing({}), KeyRing(KEYS)], ids=["no keys", "keys"])
async def test_operators_calls_are_taken_there_and_nowhere_else(service: LocalService, ring: KeyRing) -> None:
    public = create_http_app(service, keys=ring, operators=False)
    address = (HOST, free_port())
    port, url = (
        OperatorPort(create_http_app(service, keys=ring), address),
        "http://{}:{}".format(*address),
    )
    try:
        operator = {"authorization": "Bearer key-o"}
        async with (
            client_of(public) as client,
            http_at(url) as operators,
        ):
            refused = await client.get(FOR_OPERATORS, headers=operator)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")
            assert (await client.get("/v1/models", headers=operator)).status_code == 200
            assert (await operators.get(FOR_OPERATORS, headers=operator)).json()["clean"]
            tenants = await operators.get(FOR_OPERATORS, headers={"authorization": "Bearer key-a"})
            assert tenants.status_code == (403 if ring else 200)
    finally:
        await port.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


async def test_front_ends_of_a_machine_share_it(service: LocalService) -> None:
    address = (HOST, free_port())
    first, second = (OperatorPort(create_http_app(service), address) for _ in range(2))
    await first.stop()
    async with httpx.AsyncClient() as client:
        reply = await client.get(f"http://{HOST}:{address[1]}{FOR_OPERATORS}")
    assert reply.status_code == 200
    await second.stop()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((HOST, 0)) as taken:
        address = (HOST, int(taken.getsockname()[1]))
        unused: Any = None
        with pytest.raises(SettingsError, match=rf"ingress.operator_port: cannot listen at {HOST}:\d+"):
            OperatorPort(create_http_app(unused), address)
