"""A stream with nothing to say sends comments, wherever its turn waits. Clients skip the comments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from controllers.errors import StoreError
from engine.api import EngineOverloaded
from serving.cli.client.stream import EventSplitter
from serving.front.api.rules import ApiRules
from serving.front.http import create_http_app
from tests.unit.serving.front.streamed_requests import PATHS, STREAMED
from tests.unit.serving.local_service import MODEL, LocalService, http_server, local_service
from tests.unit.serving.sdk_clients import http_at

COMMENT = ": keep-alive"
OFTEN_S = 0.02
NEVER_S = 3600.0


@asynccontextmanager
async def served(directory: Path, keep_alive_s: float) -> AsyncIterator[tuple[str, LocalService]]:
    async with local_service(directory) as service:
        app = create_http_app(service, rules=ApiRules(keep_alive_s=keep_alive_s))
        async with http_server(app) as url:
            yield url, service


@pytest.mark.parametrize("path", PATHS)
async def test_a_turn_that_waits_for_its_first_token_says_that_it_lives(tmp_path: Path, path: str) -> None:
    async with served(tmp_path, OFTEN_S) as (url, service), http_at(url) as client:
        service.rig.runner.hold()
        async with client.stream("POST", path, json=PATHS[path] | {"stream": True}) as reply:
            assert reply.status_code == 200
            lines = reply.aiter_lines()
            waited = [await anext(lines) for _ in range(4)]
            assert waited == [COMMENT, "", COMMENT, ""], "before any event"
            service.rig.runner.go_on()
            rest = [line async for line in lines]
    events = [line for line in rest if line not in (COMMENT, "")]
    assert all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"
    assert len(events) > 1


@pytest.mark.parametrize("path", STREAMED)
async def test_headers_come_as_soon_as_a_turn_is_accepted(tmp_path: Path, path: str) -> None:
    """The turn's tokens may take any time after that."""
    body = STREAMED[path] | {"stream": True} | ({} if path == "/generate" else {"model": MODEL.model_id})
    async with served(tmp_path, NEVER_S) as (url, service), http_at(url) as client:
        service.rig.runner.hold()
        async with asyncio.timeout(20), client.stream("POST", path, json=body) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert service.rig.engine.stats().generated_tokens == 0
            service.rig.runner.go_on()
            assert "data: " in (await reply.aread()).decode()


async def test_headers_tell_which_turn_was_accepted(tmp_path: Path) -> None:
    body = PATHS["/v1/chat/completions"] | {"stream": True}
    async with served(tmp_path, NEVER_S) as (url, service), http_at(url) as client:
        service.rig.runner.hold()
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers={"x-session-id": "s"}
        ) as reply:
            assert reply.headers["x-session-turn"] == "0"
            service.rig.runner.go_on()
            await reply.aread()


async def test_a_response_is_created_before_it_says_anything(tmp_path: Path) -> None:
    body = STREAMED["/v1/responses"] | {"stream": True}
    async with served(tmp_path, NEVER_S) as (url, service), http_at(url) as client:
        service.rig.runner.hold()
        async with client.stream("POST", "/v1/responses", json=body) as reply:
            lines = reply.aiter_lines()
            assert await anext(lines) == "event: response.created"
            service.rig.runner.go_on()
            names = [line for line in [line async for line in lines] if line.startswith("event: ")]
    assert names[0] == "event: response.in_progress"
    assert "event: response.created" not in names


async def test_headers_wait_until_every_choice_is_accepted(tmp_path: Path) -> None:
    """The second choice finds the queue full, so the request is refused with a proper status."""
    body = PATHS["/v1/completions"] | {"stream": True, "n": 2}
    async with served(tmp_path, NEVER_S) as (url, service), http_at(url) as client:
        service.rig.runner.hold()
        submit, taken = service.rig.engine.submit, []

        def only_one(request: Any) -> None:
            if taken:
                raise EngineOverloaded("planted")
            taken.append(request)
            submit(request)

        service.rig.engine.submit = only_one
        refusing = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(20):
            while not taken:
                await asyncio.sleep(0.005)
        service.rig.runner.go_on()
        assert (await refusing).status_code == 429


async def test_a_turn_that_waits_for_the_log_says_that_it_lives(tmp_path: Path) -> None:
    async with served(tmp_path, OFTEN_S) as (url, service), http_at(url) as client:
        body = PATHS["/generate"] | {"session_params": {"id": "s"}}
        await client.post(
            "/open_session", json={"capacity_of_str_len": 1, "streaming": True, "session_id": "s"}
        )
        assert (await client.post("/generate", json=body)).status_code == 200
        service.rig.controller.log.away = True
        async with client.stream("POST", "/generate", json=body | {"stream": True}) as reply:
            heard: list[str] = []
            async with asyncio.timeout(20):
                lines = reply.aiter_lines()
                while heard.count(COMMENT) < 3:
                    heard.append(await anext(lines))
            events = [json.loads(line[6:]) for line in heard if line.startswith("data: ")]
            assert events[-1]["meta_info"]["finish_reason"] is None
            service.rig.controller.log.away = False
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]
        (final,) = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
        assert final["meta_info"]["finish_reason"]["type"] == "length"
        assert final["output_ids"] == events[-1]["output_ids"], "all tokens had been there"


async def test_a_stream_that_has_something_to_say_has_no_comments(tmp_path: Path) -> None:
    async with served(tmp_path, NEVER_S) as (url, _), http_at(url) as client:
        reply = await client.post("/generate", json=PATHS["/generate"] | {"stream": True})
        assert COMMENT not in reply.text


class LateRefusal(LocalService):
    """A service that refuses a turn once `refuse` is set."""

    def __init__(self, rig: Any) -> None:
        super().__init__(rig)
        self.refuse = asyncio.Event()

    @asynccontextmanager
    async def run(self, call: Any) -> AsyncIterator[Any]:
        await self.refuse.wait()
        self.rig.controller.failures["load_session"] = [StoreError("the log is away")]
        async with super().run(call) as events:
            yield events


async def test_a_refusal_has_a_status_unless_a_comment_came_first(tmp_path: Path) -> None:
    async with local_service(tmp_path) as inner:
        service = LateRefusal(inner.rig)
        body = PATHS["/v1/completions"] | {"stream": True}
        headers = {"x-session-id": "s"}
        async with (
            http_server(create_http_app(service, rules=ApiRules(keep_alive_s=OFTEN_S))) as url,
            http_at(url) as client,
        ):
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                assert reply.status_code == 200
                heard = reply.aiter_lines()
                assert await anext(heard) == COMMENT
                service.refuse.set()
                lines = [line async for line in heard if line not in (COMMENT, "")]
            assert json.loads(lines[0].removeprefix("data: "))["error"]["code"] == "store_unavailable"
            assert lines[1:] == ["data: [DONE]"]
        async with (
            http_server(create_http_app(service, rules=ApiRules(keep_alive_s=NEVER_S))) as url,
            http_at(url) as client,
        ):
            refused = await client.post("/v1/completions", json=body, headers=headers)
            assert refused.status_code == 503


class Recorded(httpx.AsyncByteStream):
    def __init__(self, stream: Any, heard: list[bytes]) -> None:
        self._stream = stream
        self._heard = heard

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._stream:
            self._heard.append(data)
            yield data

    async def aclose(self) -> None:
        await self._stream.aclose()


class Recorder(httpx.AsyncHTTPTransport):
    """Keeps the bytes that a client gets."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[bytes] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        reply = await super().handle_async_request(request)
        return httpx.Response(
            reply.status_code, headers=reply.headers, stream=Recorded(reply.stream, self.heard)
        )


async def test_the_openai_client_and_ours_pass_comments_over(tmp_path: Path) -> None:
    recorder = Recorder()
    async with (
        served(tmp_path, OFTEN_S) as (url, service),
        openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=httpx.AsyncClient(transport=recorder),
        ) as client,
    ):
        service.rig.runner.hold()
        asked = {"model": MODEL.model_id, "messages": [{"role": "user", "content": "a dog"}], "max_tokens": 6}
        stream = await client.chat.completions.create(**asked, stream=True, temperature=0)
        chunks = asyncio.create_task(_all(stream))
        async with asyncio.timeout(20):
            while b"".join(recorder.heard).count(COMMENT.encode()) < 2:
                await asyncio.sleep(0.001)
        service.rig.runner.go_on()
        text = "".join(chunk.choices[0].delta.content or "" for chunk in await chunks if chunk.choices)
        whole = await client.chat.completions.create(**asked, temperature=0)
    assert text == whole.choices[0].message.content
    payloads = EventSplitter().push(b"".join(recorder.heard).partition(b"[DONE]")[0])
    assert payloads
    assert all(isinstance(json.loads(payload), dict) for payload in payloads)


async def _all(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]
