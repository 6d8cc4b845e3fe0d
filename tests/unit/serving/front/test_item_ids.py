"""Ids that clients give items: each can be read, paged behind and deleted by its id, or is refused at once."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import pytest

from serving.front.api.responses.items import MAX_ID_CHARS

CONVERSATIONS = "/v1/conversations"


def messages(*ids: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "a", "id": item_id} for item_id in ids]


@pytest.mark.parametrize("item_id", ["a/b", "/", "a/../b", "%2F", "a?b#c ", "ü😀", "x" * MAX_ID_CHARS])
async def test_an_item_is_had_by_the_id_that_its_client_gave_it(
    client: httpx.AsyncClient, item_id: str
) -> None:
    made = await client.post(CONVERSATIONS, json={"items": messages(item_id, "other")})
    items = f"{CONVERSATIONS}/{made.json()['id']}/items"
    its_own = f"{items}/{quote(item_id, safe='')}"
    assert (await client.get(its_own)).json()["id"] == item_id
    page = await client.get(items, params={"after": item_id, "order": "asc"})
    assert [item["id"] for item in page.json()["data"]] == ["other"]
    assert (await client.delete(its_own)).status_code == 200
    assert [item["id"] for item in (await client.get(items)).json()["data"]] == ["other"]
    gone = await client.get(items, params={"after": item_id})
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "after")


@pytest.mark.parametrize("item_id", ["", ".", "..", "x" * (MAX_ID_CHARS + 1)])
@pytest.mark.parametrize(("path", "field"), [(CONVERSATIONS, "items"), ("/v1/responses", "input")])
async def test_an_id_that_calls_cannot_name_is_refused(
    client: httpx.AsyncClient, path: str, field: str, item_id: str
) -> None:
    """Who deleted the item of the id ".." deleted its conversation."""
    refused = await client.post(path, json={field: messages(item_id)})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"{field}[0].id"
