"""The console's files are complete, open to everybody, and served with a policy that lets them run nothing else."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.front.api.console import FOLDER
from serving.front.http import create_http_app
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from tests.unit.serving.local_service import client_of

ROOT = Path(__file__).parents[4]
NO_SERVICE: Any = None
RING = KeyRing({API_KEYS: "key-a=acme", OPERATOR_KEYS: "key-o"})
FILES = sorted(path.name for path in FOLDER.iterdir())
REFERENCE = re.compile(r"""(?:src|href)="(?!#)([^"]+)"|from "([^"]+)"|import\("([^"]+)"\)|url\(([^)]+)\)""")
FOREIGN = re.compile(r"https?://(?!www\.w3\.org/2000/svg)|//cdn|@import|innerHTML|insertAdjacentHTML|eval\(")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(create_http_app(NO_SERVICE, keys=RING)) as client:
        yield client


async def test_the_page_and_its_files_need_no_key(client: httpx.AsyncClient) -> None:
    page = await client.get("/console")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    for name in FILES:
        reply = await client.get(f"/console/{name}")
        assert (reply.status_code, reply.content) == (200, (FOLDER / name).read_bytes())
    assert (await client.get("/v1/kedge/sessions")).status_code == 401


@pytest.mark.parametrize("path", ["/console", *(f"/console/{name}" for name in FILES)])
async def test_files_run_nothing_else_and_are_in_nobodys_frame(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.get(path)
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", FILES)
def test_files_refer_to_each_other_only(name: str) -> None:
    """The console also works where no other host can be reached."""
    text = (FOLDER / name).read_text()
    assert FOREIGN.findall(text) == []
    for found in REFERENCE.findall(text):
        target = next(filter(None, found)).removeprefix("console/").removeprefix("./")
        assert (FOLDER / target).is_file(), target


def test_every_element_that_scripts_name_is_on_the_page() -> None:
    there = re.findall(r'\bid="([^"]+)"', (FOLDER / "index.html").read_text())
    assert len(set(there)) == len(there)
    named = {
        found for path in FOLDER.glob("*.js") for found in re.findall(r'byId\("([^"]+)"\)', path.read_text())
    }
    assert named - set(there) == set()


async def test_what_does_not_change_is_not_sent_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/console/main.js")
    again = await client.get("/console/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert "content-security-policy" in again.headers


@pytest.mark.parametrize("path", ["/console/none.js", "/console/..%2Fhttp.py", "/console/%2e%2e/http.py"])
async def test_nothing_else_is_there(client: httpx.AsyncClient, path: str) -> None:
    reply = await client.get(path, headers={"authorization": "Bearer key-o"})
    assert reply.status_code == 404
    assert "error" in reply.json()


async def test_a_slash_at_the_end_leads_to_the_page(client: httpx.AsyncClient) -> None:
    reply = await client.get("/console/")
    assert (reply.status_code, reply.headers["location"]) == (308, "../console")


async def test_where_operators_have_a_port_of_their_own_it_is_there_only() -> None:
    async with client_of(create_http_app(NO_SERVICE, operators=False)) as client:
        assert (await client.get("/console")).status_code == 404


def test_a_wheel_has_the_files() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    patterns = tool["setuptools"]["package-data"]["serving.front"]
    there = {path.name for pattern in patterns for path in FOLDER.parent.glob(pattern)}
    assert there == set(FILES)
