"""A request lives as long as its client: if the client leaves, its turns end at once. A stream that breaks says so."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from serving.front.http import create_http_app
from serving.wire.turns import ErrorInfo, ServiceError, TurnCall, TurnEvent
from tests.unit.serving.local_service import LocalService, client_of, http_server, local_service
from tests.unit.serving.sdk_clients import http_at

LONG = {"prompt": [5, 6, 7], "temperature": 0, "max_tokens": 500}
LONG_TURN = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0, "max_new_tokens": 500}}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def slow_server(directory: Path) -> AsyncIterator[tuple[str, LocalService]]:
    """A server whose steps take 20 ms, so that 500 tokens would take ten seconds."""
    async with local_service(directory) as service, http_server(create_http_app(service)) as url:
        service.rig.runner.step_s = 0.02
        yield url, service


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_ends_its_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool, num_prompts: int
) -> None:
    async with slow_server(tmp_path) as (url, service):
        async with http_at(url) as client:
            body = {**LONG, "prompt": [[5, 6, 7]] * num_prompts, "stream": stream}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: service.rig.engine.stats().running == num_prompts)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: service.ended == num_prompts)
        await until(lambda: service.rig.engine.stats().running == 0)
        assert service.rig.engine.stats().generated_tokens < 300
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        await service.rig.books_are_empty()


async def test_a_session_stands_at_its_last_commit_after_a_disconnect(tmp_path: Path) -> None:
    async with slow_server(tmp_path) as (url, service), http_at(url) as client:
        await client.post(
            "/open_session", json={"capacity_of_str_len": 1, "streaming": True, "session_id": "s"}
        )
        session = {"session_params": {"id": "s"}}
        first = {**LONG_TURN, "sampling_params": {"temperature": 0, "max_new_tokens": 4}, **session}
        await client.post("/generate", json=first)
        async with (
            http_at(url) as leaver,
            leaver.stream("POST", "/generate", json={**LONG_TURN, **session, "stream": True}) as reply,
        ):
            async for _ in reply.aiter_lines():
                break
        await until(lambda: service.ended == 2)
        await service.rig.settled()
        again = (await client.post("/generate", json=first)).json()
        assert again["meta_info"]["prompt_tokens"] == 3 + 4 + 3


class BreakingService:
    """A service whose turn says one word and then breaks, which does not happen with a healthy replica."""

    model = LocalService.model

    def __init__(self, breaks: Exception | TurnEvent | None, *, at_once: bool = False) -> None:
        self._breaks = breaks
        self._at_once = at_once

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:  # noqa: ARG002
        if self._at_once and isinstance(self._breaks, Exception):
            raise self._breaks
        yield self._events()

    async def _events(self) -> AsyncIterator[TurnEvent]:
        yield TurnEvent("word", (5,), 3, 0, 1)
        if isinstance(self._breaks, Exception):
            raise self._breaks
        if self._breaks is not None:
            yield self._breaks

    async def metrics_text(self) -> str:
        raise RuntimeError("secret detail")


LOST = ErrorInfo(503, "replica_lost", "The replica died.", retry_after_s=0.2)
BREAKS = [
    (TurnEvent(error=LOST), "The replica died."),
    (ServiceError(LOST), "The replica died."),
    (RuntimeError("secret detail"), "internal error"),
    (None, "without a result"),
]


@pytest.mark.parametrize(("breaks", "message"), BREAKS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_a_stream_that_breaks_off_says_so(breaks: object, message: str, path: str) -> None:
    inputs = {"/generate": {"text": "a"}, "/v1/completions": {"prompt": "a"}}
    body = inputs.get(path, {"messages": [{"role": "user", "content": "a"}]})
    async with client_of(create_http_app(BreakingService(breaks))) as client:
        reply = await client.post(path, json={**body, "stream": True})
        assert reply.status_code == 200
        word, error, done = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
        assert "word" in word
        assert message in json.loads(error)["error"]["message"]
        assert "secret" not in error
        assert done == "[DONE]"
        whole = await client.post(path, json=body)
        assert whole.status_code in (500, 503)
        assert message in whole.json()["error"]["message"]


@pytest.mark.parametrize("num_prompts", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_before_the_first_event_has_a_status(stream: bool, num_prompts: int) -> None:
    service = BreakingService(ServiceError(LOST), at_once=True)
    async with client_of(create_http_app(service)) as client:
        body = {"prompt": ["a"] * num_prompts, "stream": stream}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "1"
        assert reply.json()["error"] == {
            "message": "The replica died.",
            "type": "server_error",
            "param": None,
            "code": "replica_lost",
        }


async def test_the_unforeseen_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(create_http_app(BreakingService(None))) as client:
        with caplog.at_level(logging.ERROR):
            reply = await client.get("/metrics")
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert "secret detail" in caplog.text


async def test_a_queue_full_of_events_does_not_block_the_end() -> None:
    """Choices whose events nobody reads any more are cancelled. The end does not wait for them."""

    class Endless(BreakingService):
        async def _events(self) -> AsyncIterator[TurnEvent]:
            while True:
                yield TurnEvent("word", (5,), 3, 0, 1)
                await asyncio.sleep(0)

    class Mixed(BreakingService):
        @asynccontextmanager
        async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
            if call.request_id.endswith("-1"):
                await asyncio.sleep(0.2)
                raise ServiceError(LOST)
            yield Endless(None)._events()

    async with client_of(create_http_app(Mixed(None))) as client:
        async with asyncio.timeout(60):
            reply = await client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert reply.status_code == 503


async def test_the_calls_of_one_request_are_begun_one_by_one() -> None:
    """256 calls at once used to hold the front end's event loop for 0.1 s."""
    since = most_between = 0

    class Noting(BreakingService):
        @asynccontextmanager
        async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
            nonlocal since, most_between
            since += 1
            most_between = max(most_between, since)
            async with super().run(call) as events:
                yield events

    async def others() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    async with client_of(create_http_app(Noting(ServiceError(LOST)))) as client:
        await client.post("/v1/completions", json={"prompt": ["a"] * 64})
    running.cancel()
    assert most_between == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_refused_is_sent_once_whatever_the_number_of_choices(
    client: httpx.AsyncClient, service: LocalService, stream: bool
) -> None:
    """128 choices of a prompt of 11 MB kept a replica's event loop for two seconds before it had refused them all."""
    too_long = {"prompt": [5] * 5000, "max_tokens": 2, "n": 20, "stream": stream}
    reply = await client.post("/v1/completions", json=too_long)
    assert (reply.status_code, len(service.calls)) == (400, 1), reply.text
    reply = await client.post("/v1/completions", json={**too_long, "prompt": [5, 6, 7]})
    assert reply.status_code == 200
    assert len(service.calls) == 21
    await until(lambda: service.ended == 21)
    if not stream:
        assert [choice["index"] for choice in reply.json()["choices"]] == list(range(20))
    else:
        assert {json.loads(line[6:])["choices"][0]["index"] for line in _events(reply.text)} == {*range(20)}


def _events(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("data: {")]
