"""A model answers under its aliases in every protocol, and is listed under each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from serving.settings.config import parse_args
from serving.settings.strict_settings import SettingsError
from tests.unit.serving.local_service import MODEL, local_client

ALIASES = ("claude-small", "gpt/large")
MESSAGES = [{"role": "user", "content": "a dog"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "a dog", "max_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "a dog"},
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with local_client(tmp_path) as (http, service):
        service.model = replace(MODEL, aliases=ALIASES)
        yield http


@pytest.mark.parametrize("path", BODIES)
async def test_an_alias_names_the_model(client: httpx.AsyncClient, path: str) -> None:
    for name in (MODEL.model_id, *ALIASES):
        reply = await client.post(path, json={"model": name, **BODIES[path]})
        assert reply.status_code == 200, reply.text
        assert reply.json().get("model", MODEL.model_id) == MODEL.model_id
    other = await client.post(path, json={"model": "claude-large", **BODIES[path]})
    assert other.is_client_error


async def test_aliases_are_listed_behind_the_name(client: httpx.AsyncClient) -> None:
    cards = (await client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == [MODEL.model_id, *ALIASES]
    for card in cards:
        assert (await client.get(f"/v1/models/{card['id']}")).json() == card
    assert (await client.get("/v1/models/claude-large")).status_code == 404


def test_aliases_are_given_once() -> None:
    model = {"path": "assets/models/kedge-chat"}
    assert parse_args({"model": {**model, "aliases": ["a", "b"]}}).model.aliases == ["a", "b"]
    for wrong in (["a", "a"], [""], "a"):
        with pytest.raises(SettingsError, match=r"model\.aliases"):
            parse_args({"model": {**model, "aliases": wrong}})
