"""Calls that a browser sends for a page: what a foreign page cannot do to a server on its reader's machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.api.browsers import NO_RULES, BrowserRules
from serving.front.http import create_http_app
from serving.keys import API_KEYS, KeyRing
from serving.settings.config import parse_args
from serving.settings.strict_settings import SettingsError
from tests.unit.serving.local_service import LocalService, client_of, local_service

KEY = "a-key"
PAGES = "https://pages.example"
RULES = BrowserRules(hosts=("kedge.lan", "*.svc.cluster.local"), origins=(PAGES,))
SESSIONS = "/v1/kedge/sessions"


@asynccontextmanager
async def serving(
    tmp_path: Path, rules: BrowserRules = NO_RULES, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, LocalService]]:
    async with local_service(tmp_path) as service:
        app = create_http_app(service, browser_rules=rules, **options)
        async with client_of(app) as client:
            yield client, service


async def test_what_changes_something_is_no_get(tmp_path: Path) -> None:
    """Any page could contain `GET /flush_cache` as an image's address."""
    async with serving(tmp_path) as (client, _):
        assert (await client.get("/flush_cache")).status_code == 405
        assert (await client.post("/flush_cache")).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "kedge.localhost", "127.0.0.1:8000", "[::1]:8000", "192.0.2.7"]
)
async def test_without_keys_the_server_is_called_by_address_or_as_localhost(
    tmp_path: Path, host: str
) -> None:
    """Kubernetes' probes use addresses. A browser sends a page's calls under the page's own host name, whatever address
    it has."""
    async with serving(tmp_path) as (client, _):
        assert (await client.get(SESSIONS, headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "[::1", "kedge.lan"]
)
async def test_without_keys_another_name_is_refused(tmp_path: Path, host: str) -> None:
    """A site that gave its own name the address 127.0.0.1 could read the list of sessions."""
    async with serving(tmp_path) as (client, _):
        reply = await client.get(SESSIONS, headers={"host": host})
        assert reply.status_code == 403
        assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == ("host_not_allowed", "host")
        assert "ingress.allowed_hosts" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("kedge.lan", 200),
        ("KEDGE.lan:80", 200),
        ("a.svc.cluster.local", 200),
        ("svc.cluster.local", 403),
        ("notkedge.lan", 403),
    ],
)
async def test_names_can_be_allowed(tmp_path: Path, host: str, status: int) -> None:
    async with serving(tmp_path, RULES) as (client, _):
        assert (await client.get(SESSIONS, headers={"host": host})).status_code == status


async def test_with_keys_names_count_only_where_some_are_given(tmp_path: Path) -> None:
    headers = {"authorization": f"Bearer {KEY}", "host": "any.example"}
    async with serving(tmp_path, keys=KeyRing({API_KEYS: KEY})) as (client, _):
        assert (await client.get(SESSIONS, headers=headers)).status_code == 200
    async with serving(tmp_path / "named", RULES, keys=KeyRing({API_KEYS: KEY})) as (client, _):
        assert (await client.get(SESSIONS, headers=headers)).status_code == 403


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null"])
async def test_without_keys_a_strangers_page_changes_nothing(tmp_path: Path, origin: str) -> None:
    """Any page could send it as a form: a browser asks nobody before such a call."""
    headers = {"origin": origin, "content-type": "text/plain"}
    async with serving(tmp_path) as (client, _):
        for path in (SESSIONS, "/open_session", "/flush_cache"):
            reply = await client.post(path, headers=headers, content=b"{}")
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert (await client.get(SESSIONS)).json()["sessions"] == []


async def test_a_page_of_the_server_itself_may_call(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, _):
        headers = {"origin": "http://localhost:8000", "host": "localhost:8000"}
        assert (await client.post(SESSIONS, headers=headers, json={})).status_code == 201


async def test_only_pages_that_are_named_can_read_answers(tmp_path: Path) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with serving(tmp_path, RULES, keys=KeyRing({API_KEYS: KEY})) as (client, _):
        asked = await client.options(SESSIONS, headers={"origin": PAGES, **preflight})
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, PAGES)
        headers = {"origin": PAGES, "authorization": f"Bearer {KEY}"}
        reply = await client.post(SESSIONS, headers=headers, json={})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (201, PAGES)
        other = await client.options(SESSIONS, headers={"origin": "https://evil.example", **preflight})
        assert "access-control-allow-origin" not in other.headers
    async with serving(tmp_path / "unnamed") as (client, _):
        asked = await client.options(SESSIONS, headers={"origin": PAGES, **preflight})
        assert "access-control-allow-origin" not in asked.headers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("allowed_hosts", ["kedge.lan:8000"]),
        ("allowed_hosts", ["http://kedge.lan"]),
        ("allowed_hosts", ["*"]),
        ("allowed_hosts", "kedge.lan"),
        ("allowed_origins", ["pages.example"]),
        ("allowed_origins", ["https://pages.example/"]),
        ("allowed_origins", ["*"]),
    ],
)
def test_a_bad_setting_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"args\.ingress\.{key}"):
        parse_args({"model": {"path": "assets/models/kedge-chat"}, "ingress": {key: value}})
