"""A key reaches its own tenant's sessions. What belongs to all tenants needs an operator's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.http import create_http_app
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from tests.unit.serving.local_service import MODEL, client_of, local_service

RING = KeyRing({API_KEYS: "acmes=acme,others=other,gateways", OPERATOR_KEYS: "operators"})
SESSIONS = "/v1/kedge/sessions"
TURN: dict[str, Any] = {"model": MODEL.model_id, "prompt": [5], "max_tokens": 2}
FOR_OPERATORS = [
    ("GET", "/v1/kedge/audit"),
    ("GET", "/v1/kedge/watch?count=1"),
    ("GET", "/get_server_info"),
    ("GET", "/server_info"),
    ("GET", "/get_load"),
    ("POST", "/flush_cache"),
    ("POST", "/v1/kedge/replicas/a/drain"),
    ("POST", "/v1/kedge/sessions/s/move"),
]


@pytest.fixture
def app_options() -> dict[str, Any]:
    return {"keys": RING}


def key(name: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"} | headers


async def turn(client: httpx.AsyncClient, session: str, **headers: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=TURN, headers=headers | {"x-session-id": session})


async def listed(client: httpx.AsyncClient, headers: dict[str, str]) -> list[tuple[str, str]]:
    reply = await client.get(SESSIONS, headers=headers)
    return [(session["tenant"], session["session_id"]) for session in reply.json()["sessions"]]


async def test_the_same_id_is_another_session_of_each_tenant(client: httpx.AsyncClient) -> None:
    """A tenant used to get `session_exists` for an id that another tenant had."""
    for name in ("acmes", "others"):
        opened = await client.post(SESSIONS, json={"session_id": "s"}, headers=key(name))
        assert (opened.status_code, opened.json()) == (201, {"session_id": "s"})
    assert (await turn(client, "s", **key("acmes"))).json()["usage"]["prompt_tokens"] == 1
    assert (await turn(client, "s", **key("acmes"))).json()["usage"]["prompt_tokens"] > 1
    assert (await turn(client, "s", **key("others"))).json()["usage"]["prompt_tokens"] == 1
    again = await client.post(SESSIONS, json={"session_id": "s"}, headers=key("acmes"))
    assert again.json()["error"]["message"] == "session 's' is open already"
    assert (await client.delete(f"{SESSIONS}/s", headers=key("others"))).status_code == 204
    assert await listed(client, key("operators")) == [("acme", "s")]


async def test_a_key_of_a_tenant_names_no_other(client: httpx.AsyncClient) -> None:
    """Anybody with a key could list, fork and close the sessions of every tenant, by naming it."""
    await client.post(SESSIONS, json={"session_id": "s"}, headers=key("acmes"))
    foreign = key("others", **{"x-tenant-id": "acme"})
    for method, path in (("GET", ""), ("GET", "/s"), ("DELETE", "/s"), ("POST", "/s/fork")):
        body = {} if method == "POST" else None
        reply = await client.request(method, SESSIONS + path, headers=foreign, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (403, "x-tenant-id"), path
        reply = await client.request(method, SESSIONS + path, headers=key("others"), json=body)
        assert reply.status_code == (404 if path else 200), path
    assert (await turn(client, "s", **foreign)).json()["error"]["code"] == "tenant_not_allowed"
    assert await listed(client, key("others")) == []
    assert await listed(client, key("acmes", **{"x-tenant-id": "acme"})) == [("acme", "s")]


async def test_a_gateways_key_is_of_the_tenant_that_it_names(client: httpx.AsyncClient) -> None:
    for tenant in ("acme", "new"):
        headers = key("gateways", **{"x-tenant-id": tenant})
        assert (await turn(client, "s", **headers)).status_code == 200
        assert await listed(client, headers) == [(tenant, "s")]
    assert await listed(client, key("gateways")) == []
    assert await listed(client, key("operators")) == [("acme", "s"), ("new", "s")]
    assert await listed(client, key("operators", **{"x-tenant-id": "new"})) == [("new", "s")]


@pytest.mark.parametrize(("method", "path"), FOR_OPERATORS)
@pytest.mark.parametrize("name", ["acmes", "gateways"])
async def test_what_is_everybodys_needs_an_operators_key(
    client: httpx.AsyncClient, method: str, path: str, name: str
) -> None:
    """Any key could flush the cache, drain replicas and read the audit and the settings."""
    reply = await client.request(method, path, headers=key(name))
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "operator_only")


@pytest.mark.parametrize(("method", "path"), FOR_OPERATORS[:4])
async def test_an_operator_may(client: httpx.AsyncClient, method: str, path: str) -> None:
    assert (await client.request(method, path, headers=key("operators"))).status_code == 200


@pytest.mark.parametrize(
    "name", ["authorization", "x-tenant-id", "x-session-id", "idempotency-key", "host", "origin"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
async def test_a_header_that_says_who_calls_comes_once(
    client: httpx.AsyncClient, name: str, path: str
) -> None:
    """Of two such headers the first used to count, but a proxy in front may have checked the other."""
    values = {"authorization": "Bearer gateways", "host": "localhost"}
    headers = [(name, values.get(name, "a")), (name.title(), values.get(name, "b"))]
    if name != "authorization":
        headers.append(("authorization", "Bearer gateways"))
    reply = await client.request("GET" if path == "/health" else "POST", path, headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    assert reply.json()["error"]["code"] == "duplicate_header"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (SESSIONS, {"timeout_s": 1e9}, "timeout_s"),
        ("/open_session", {"capacity_of_str_len": 0, "streaming": True, "timeout": 1e9}, "timeout"),
    ],
)
async def test_nobody_keeps_a_session_for_ever(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    """With `timeout_s: 1e9` a tenant could take all sessions that there may be and leave none to others."""
    reply = await client.post(path, json=body, headers=key("acmes"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert "604800 s at most" in reply.json()["error"]["message"]
    assert await listed(client, key("operators")) == []


BY_PATH: list[tuple[str, str, Any]] = [
    ("GET", "", None),
    ("GET", "?messages=true", None),
    ("GET", "?rid=r", None),
    ("POST", "/fork", {"new_session_id": "f"}),
    ("POST", "/rewind", {"length": 1}),
    ("POST", "/rewind", {"turn": 0}),
    ("DELETE", "", None),
]
NO_NAMES = ["acme%20diary", "acme%20", "%20diary", "tree%1Fr", "diary%0D", "di%C3%A4ry", "d" * 257]
ELSEWHERE: list[tuple[str, str, Any, dict[str, str]]] = [
    ("POST", "/v1/completions", TURN, {"x-session-id": "acme diary"}),
    ("POST", "/v1/completions", TURN, {"x-session-id": "diary", "x-tenant-id": "acme "}),
    ("POST", SESSIONS, {"session_id": "acme diary"}, {}),
    ("POST", "/open_session", {"capacity_of_str_len": 1, "session_id": "acme diary"}, {}),
    ("POST", "/close_session", {"session_id": "acme diary"}, {}),
    ("POST", "/generate", {"input_ids": [5], "session_params": {"id": "acme diary"}}, {}),
    ("POST", "/generate", {"input_ids": [5], "session_params": {"id": "tree", "rid": "x acme diary"}}, {}),
    ("POST", f"{SESSIONS}/own/fork", {"new_session_id": "acme child"}, {}),
    ("GET", f"{SESSIONS}/own?rid=acme%20diary", None, {}),
    ("POST", "/v1/responses", {"input": "a", "previous_response_id": "acme diary"}, {}),
    ("POST", "/v1/responses", {"input": "a", "conversation": "acme diary"}, {}),
    ("GET", "/v1/responses/acme%20diary", None, {}),
    ("DELETE", "/v1/responses/acme%20diary", None, {}),
    ("POST", "/v1/responses/acme%20diary/cancel", None, {}),
    ("GET", "/v1/conversations/acme%20diary", None, {}),
    ("DELETE", "/v1/conversations/acme%20diary", None, {}),
]


async def test_no_id_is_the_key_of_another_tenants_session(client: httpx.AsyncClient) -> None:
    """The ids in paths were not checked: a caller of no tenant could fork, rewind and close `acme%20diary`, which is
    the key of the tenant's session."""
    assert (await turn(client, "diary", **key("acmes"))).status_code == 200
    for name in ("own", "tree"):
        opened = {"capacity_of_str_len": 1, "session_id": name, "streaming": name == "own"}
        assert (await client.post("/open_session", json=opened, headers=key("gateways"))).status_code == 200
    state = [(await client.get(f"{SESSIONS}/diary?messages=true", headers=key("acmes"))).json()]
    sessions = await listed(client, key("operators"))
    for session_id in NO_NAMES:
        for method, path, body in BY_PATH:
            asked = f"{SESSIONS}/{session_id}{path}"
            for name in ("gateways", "acmes"):
                reply = await client.request(method, asked, json=body, headers=key(name))
                assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found"), asked
        moved = await client.post(f"{SESSIONS}/{session_id}/move", json={}, headers=key("operators"))
        assert moved.json()["error"]["code"] == "session_not_found"
    for method, path, body, headers in ELSEWHERE:
        reply = await client.request(method, path, json=body, headers=key("gateways", **headers))
        assert reply.status_code in (400, 404), (path, body, headers, reply.text)
    assert await listed(client, key("operators")) == sessions
    state.append((await client.get(f"{SESSIONS}/diary?messages=true", headers=key("acmes"))).json())
    assert state[0] | {"idle_s": 0} == state[1] | {"idle_s": 0}


async def test_a_generated_health_check_is_a_turn_of_its_callers_tenant(tmp_path: Path) -> None:
    """It was one of the tenant without a name: it passed the caller's limit of turns, and used up that tenant's."""
    async with (
        local_service(tmp_path) as service,
        client_of(create_http_app(service, keys=RING)) as client,
    ):
        assert (await client.get("/health_generate", headers=key("acmes"))).status_code == 200
    assert [call.tenant for call in service.calls] == ["acme"]
