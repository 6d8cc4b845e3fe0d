"""Both SDKs send a request with a 409 again. The header `x-should-retry` tells them when that is of no use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from serving.front.api.errors import NO_RETRY_HELPS, error_response
from serving.front.http import create_http_app
from serving.wire.errors import STATUS_BY_CODE
from serving.wire.turns import ErrorInfo
from tests.unit.serving.local_service import MODEL, LocalService, http_server, local_service
from tests.unit.serving.sdk_clients import anthropic_at, http_at, openai_at

HELLO = {"role": "user", "content": "My dog is called Rex."}
ASKED: dict[str, Any] = {"model": MODEL.model_id, "messages": [HELLO], "max_tokens": 3}
HEADERS = {
    "history_differs": {"x-session-id": "talk", "x-session-mode": "full"},
    "turn_differs": {"x-session-id": "talk", "x-session-turn": "7"},
    "session_is_tree": {"x-session-id": "tree"},
    "idempotency_conflict": {"x-session-id": "talk", "idempotency-key": "first"},
}


@dataclass
class Scene:
    """A service, and its clients as they are by default: they try three times."""

    service: LocalService
    url: str
    sent: list[str] = field(default_factory=list)
    """The SDK's retry count of each request."""

    @asynccontextmanager
    async def ask(self, sdk: str) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
        """A function that runs a turn."""

        async def note(request: Any) -> None:
            self.sent.append(request.headers["x-stainless-retry-count"])

        client_at = openai_at if sdk == "openai" else anthropic_at
        client: Any = client_at(self.url, max_retries=2)
        client._client.event_hooks["request"].append(note)
        async with client:
            yield client.chat.completions.create if sdk == "openai" else client.messages.create


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with local_service(tmp_path) as service, http_server(create_http_app(service)) as url:
        yield Scene(service, url)


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
@pytest.mark.parametrize("code", HEADERS)
async def test_a_conflict_that_stays_is_sent_once(scene: Scene, sdk: str, code: str) -> None:
    async with scene.ask(sdk) as ask, http_at(scene.url) as client:
        await client.post("/open_session", json={"session_id": "tree", "capacity_of_str_len": 1000})
        await ask(**ASKED, extra_headers={"x-session-id": "talk", "idempotency-key": "first"})
        scene.sent.clear()
        other = [{"role": "user", "content": "My cat is called Tom."}]
        with pytest.raises((openai.ConflictError, anthropic.ConflictError)) as caught:
            await ask(**{**ASKED, "messages": other}, extra_headers=HEADERS[code])
    assert scene.sent == ["0"]
    assert caught.value.response.headers["x-should-retry"] == "false"
    if isinstance(caught.value, openai.ConflictError):
        assert caught.value.code == code


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
async def test_a_turn_in_flight_is_tried_again(scene: Scene, sdk: str) -> None:
    """The first turn ends before the second try."""
    rig = scene.service.rig
    rig.runner.hold()
    in_session = {"extra_headers": {"x-session-id": "talk", "x-session-mode": "append"}}
    async with scene.ask(sdk) as ask:
        first = asyncio.create_task(ask(**ASKED, **in_session))
        await rig.begun()
        second = asyncio.create_task(ask(**ASKED, **in_session))
        async with asyncio.timeout(20):
            while len(scene.sent) < 3:
                await asyncio.sleep(0.01)
        rig.runner.go_on()
        await asyncio.gather(first, second)
    assert scene.sent[:3] == ["0", "0", "1"]


@pytest.mark.parametrize("code", [code for code, status in STATUS_BY_CODE.items() if status == 409])
def test_only_what_stays_says_so(code: str) -> None:
    passing = {"session_busy", "turn_in_flight", "turn_not_in_flight", "session_closing", "stale_epoch"}
    headers = error_response({"path": "/v1/responses"}, ErrorInfo(409, code, "no")).headers
    assert (headers.get("x-should-retry") == "false") == (code in NO_RETRY_HELPS)
    assert (code in NO_RETRY_HELPS) == (code not in passing | {"session_moved"})
