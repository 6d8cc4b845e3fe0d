"""GET /v1/kedge/sessions, page by page: it has every session of the caller once, and no others."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from serving.front.api.sessions.routes import MOST_IN_PAGE
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from tests.unit.serving.local_service import LocalService

RING = KeyRing({API_KEYS: "acmes=acme,others=other,gateways", OPERATOR_KEYS: "operators"})
SESSIONS = "/v1/kedge/sessions"
NAMES = ["a/b", "s1", "s10", "s2"]


@pytest.fixture
def app_options() -> dict[str, Any]:
    return {"keys": RING}


@pytest.fixture(autouse=True)
async def opened(service: LocalService) -> None:
    """Each tenant has sessions of these names."""
    for tenant in ("acme", "other", ""):
        for name in reversed(NAMES):
            await service.open_session(name, timeout_s=None, capacity_tokens=None, tenant=tenant)


async def pages(
    client: httpx.AsyncClient, key: str, limit: int, **headers: str
) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    params: dict[str, Any] = {"limit": limit}
    while True:
        reply = await client.get(
            SESSIONS, params=params, headers={"authorization": f"Bearer {key}"} | headers
        )
        page = reply.raise_for_status().json()
        found.append([(each["tenant"], each["session_id"]) for each in page["sessions"]])
        if page["next"] is None:
            return found
        params["after"] = page["next"]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 100])
async def test_a_tenants_pages_have_each_of_its_own_once(client: httpx.AsyncClient, limit: int) -> None:
    found = await pages(client, "acmes", limit)
    assert [name for page in found for name in page] == [("acme", name) for name in NAMES]
    assert [len(page) for page in found] == [min(limit, 4 - at) for at in range(0, 4, limit)], "none is empty"
    by_gateway = await pages(client, "gateways", limit, **{"x-tenant-id": "acme"})
    assert by_gateway == found
    assert {tenant for page in await pages(client, "gateways", limit) for tenant, _ in page} == {""}


@pytest.mark.parametrize("limit", [1, 3, 5, 100])
async def test_an_operators_pages_have_those_of_all_tenants(client: httpx.AsyncClient, limit: int) -> None:
    found = await pages(client, "operators", limit)
    everything = [(tenant, name) for tenant in ("", "acme", "other") for name in NAMES]
    assert [name for page in found for name in page] == everything
    named = await pages(client, "operators", limit, **{"x-tenant-id": "other"})
    assert [name for page in named for name in page] == everything[8:]


@pytest.mark.parametrize("after", ["", "acme s1", "other a/b", "zzz", "other s2"])
async def test_another_tenants_cursor_shows_nothing_of_its_sessions(
    client: httpx.AsyncClient, after: str
) -> None:
    reply = await client.get(SESSIONS, params={"after": after}, headers={"authorization": "Bearer acmes"})
    assert {each["tenant"] for each in reply.json()["sessions"]} <= {"acme"}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": MOST_IN_PAGE + 1}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"after": "x" * 2000}, "after"),
    ],
)
async def test_a_bad_page_is_refused_by_its_field(
    client: httpx.AsyncClient, params: dict[str, Any], field: str
) -> None:
    reply = await client.get(SESSIONS, params=params, headers={"authorization": "Bearer operators"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


async def test_one_session_is_found_by_its_tenant_alone(
    client: httpx.AsyncClient,
) -> None:
    """A name that looks like another tenant's session key is just a name."""
    for key, name, status in (
        ("acmes", "s1", 200),
        ("acmes", "a/b", 200),
        ("acmes", "s3", 404),
        ("gateways", "acme s1", 404),
        ("acmes", "acme s1", 404),
        ("others", "acme s1", 404),
    ):
        reply = await client.get(f"{SESSIONS}/{name}", headers={"authorization": f"Bearer {key}"})
        assert (name, reply.status_code) == (name, status)
        if status == 200:
            assert reply.json()["session_id"] == name


async def test_the_service_is_asked_for_one_more_than_the_page(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service used to give its whole ledger, from which the page was cut."""
    asked: list[dict[str, Any]] = []
    sessions = service.sessions

    async def noted(**options: Any) -> Any:
        asked.append(options)
        return await sessions(**options)

    monkeypatch.setattr(service, "sessions", noted)
    headers = {"authorization": "Bearer acmes"}
    await client.get(SESSIONS, params={"limit": 2, "after": "acme s1"}, headers=headers)
    await client.get(SESSIONS, headers=headers)
    assert asked == [
        {"tenant": "acme", "after": "acme s1", "limit": 3},
        {"tenant": "acme", "after": None, "limit": MOST_IN_PAGE + 1},
    ]
