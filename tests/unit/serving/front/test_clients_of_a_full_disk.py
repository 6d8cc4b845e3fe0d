"""Clients while the disk of the session log is full: what changes the log ends in 503 after its patience, all else
goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from serving.front import session_owners
from serving.front.http import create_http_app
from tests.unit.controllers.full_disk import full_disk
from tests.unit.serving.local_service import LocalService, client_of, small_text
from tests.unit.serving.replica_rig import MODEL, running_rig

PATIENCE_S = 0.1
ASKED = {"model": MODEL.model_id, "input": "a dog", "max_output_tokens": 4}


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.01)
    settings = {"controller": {"commit_patience_s": PATIENCE_S}}
    async with running_rig(tmp_path, settings=settings, text=small_text()) as rig:
        service = LocalService(rig, failover_timeout_s=PATIENCE_S)
        async with client_of(create_http_app(service, metrics=service.metrics)) as client:
            yield client


async def test_turns_opens_and_closes_are_refused_and_what_was_said_can_be_read(
    client: httpx.AsyncClient,
) -> None:
    first = (await client.post("/v1/responses", json=ASKED)).json()["id"]
    following = {**ASKED, "previous_response_id": first}
    opening = {"session_id": "s", "capacity_of_str_len": 1000}
    with full_disk():
        refusals = [
            await client.post("/v1/responses", json=following),
            await client.post("/v1/responses", json=ASKED),
            await client.delete(f"/v1/responses/{first}"),
            await client.post("/open_session", json=opening),
        ]
        unnamed = await client.post("/v1/responses", json={**ASKED, "store": False})
        read = await client.get(f"/v1/responses/{first}")
    for refusal in refusals:
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "store_unavailable")
        assert refusal.headers["retry-after"] == "1"
    assert (unnamed.status_code, read.status_code) == (200, 200)
    assert (await client.post("/v1/responses", json=following)).status_code == 200
    assert (await client.post("/open_session", json=opening)).json() == "s"
    assert (await client.post("/close_session", json={"session_id": "s"})).status_code == 200


async def test_the_log_says_why_a_session_could_not_be_opened(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """The client must not be told paths, and nobody else was told them, or that the disk was full, unless a turn had to
    commit meanwhile."""
    with full_disk():
        refusal = await client.post("/open_session", json={"session_id": "s", "capacity_of_str_len": 1000})
    assert refusal.status_code == 503
    assert "disk" not in refusal.text
    (told,) = [each for each in caplog.records if each.name == session_owners.__name__]
    assert told.getMessage().endswith("log.sqlite3: disk I/O error)")
