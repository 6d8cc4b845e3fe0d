"""Metrics of requests as clients see them: status by the path's template and time to the first event. A chunk costs
nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import StreamingResponse
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send

from serving.front.api.counted import RequestsCounted
from serving.front.api.messages.stream import MessageEncoder
from serving.front.api.sse import KEEP_ALIVE_COMMENT, typed_event
from serving.watch.metrics import IngressMetrics
from tests.unit.serving.local_service import client_of, local_client

CREATED = typed_event({"type": "response.created"})


def figure(metrics: IngressMetrics, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(metrics.render())
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in found if labels.items() <= sample.labels.items())


async def test_routes_are_templates_and_statuses_classes(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, service):
        for _ in range(2):
            await client.get("/v1/kedge/sessions/nobody-has-this")
        await client.get("/made/up/by-a-client")
        await client.request("BREW", "/v1/models")
        await client.get("/v1/models")
        metrics = service.metrics
    count = "kedge_http_requests_total"
    assert figure(metrics, count, route="/v1/kedge/sessions/{session_id}", method="GET", status="4xx") == 2
    assert figure(metrics, count, route="other", method="GET", status="4xx") == 1
    assert figure(metrics, count, method="other", status="4xx") == 1
    assert figure(metrics, count, route="/v1/models", status="2xx") == 1
    assert "nobody-has-this" not in metrics.render()
    assert "made/up" not in metrics.render()
    assert figure(metrics, "kedge_http_requests_in_flight") == 0


async def test_what_is_refused_before_any_route_counts(tmp_path: Path) -> None:
    async with local_client(tmp_path) as (client, service):
        reply = await client.get("/v1/models", headers={"host": "rebound.example"})
        assert reply.status_code == 403
    assert figure(service.metrics, "kedge_http_requests_total", route="other", status="4xx") == 1


async def test_a_stream_has_a_first_event_and_an_answer_has_none(tmp_path: Path) -> None:
    chat = {"model": "null-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    async with local_client(tmp_path) as (client, service):
        await client.post("/v1/chat/completions", json=chat)
        assert figure(service.metrics, "kedge_http_ttft_seconds_count") == 0
        await client.post("/v1/chat/completions", json={**chat, "stream": True})
    route = "/v1/chat/completions"
    assert figure(service.metrics, "kedge_http_ttft_seconds_count", route=route) == 1
    assert figure(service.metrics, "kedge_http_request_seconds_count", route=route) == 2


class Clocked:
    """An application whose clock ticks at each look, so that the looks are counted."""

    def __init__(self) -> None:
        self.metrics = IngressMetrics("f")
        self.ticks = itertools.count()
        self.app = FastAPI()

    def client(self) -> httpx.AsyncClient:
        self.app.add_middleware(RequestsCounted, metrics=self.metrics, clock=lambda: float(next(self.ticks)))
        return client_of(self.app)


async def test_chunks_behind_the_first_cost_no_look_at_the_clock() -> None:
    clocked = Clocked()

    @clocked.app.get("/stream")
    async def stream() -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            for number in range(50):
                yield f"data: {number}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async with clocked.client() as client:
        assert (await client.get("/stream")).text.count("data") == 50
    assert next(clocked.ticks) == 3, "begin, first event, end"
    assert figure(clocked.metrics, "kedge_http_ttft_seconds_sum", route="/stream") == 1
    assert figure(clocked.metrics, "kedge_http_request_seconds_sum", route="/stream") == 2


@pytest.mark.parametrize(
    "sign_of_life",
    [KEEP_ALIVE_COMMENT, MessageEncoder.keep_alive, CREATED],
    ids=["comment", "ping", "created"],
)
async def test_a_sign_of_life_is_no_first_event(sign_of_life: bytes) -> None:
    """Otherwise a prompt that takes minutes would seem to take only the interval between signs of life."""
    clocked = Clocked()

    @clocked.app.get("/slow")
    async def slow() -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield sign_of_life
                next(clocked.ticks)
            yield b"data: at last\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async with clocked.client() as client:
        await client.get("/slow")
    assert figure(clocked.metrics, "kedge_http_ttft_seconds_sum", route="/slow") == 4


async def test_a_response_that_begins_with_its_output_is_told_at_once() -> None:
    clocked = Clocked()

    @clocked.app.get("/quick")
    async def quick() -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            yield CREATED + typed_event({"type": "response.output_item.added"})
            next(clocked.ticks)
            yield b"data: more\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async with clocked.client() as client:
        await client.get("/quick")
    assert figure(clocked.metrics, "kedge_http_ttft_seconds_sum", route="/quick") == 1


async def test_what_nobody_expected_is_a_server_error() -> None:
    clocked = Clocked()

    @clocked.app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("planted")

    async with clocked.client() as client:
        with pytest.raises(RuntimeError, match="planted"):
            await client.get("/broken")
    assert figure(clocked.metrics, "kedge_http_requests_total", route="/broken", status="5xx") == 1
    assert figure(clocked.metrics, "kedge_http_requests_in_flight") == 0


async def test_a_client_that_leaves_before_an_answer() -> None:
    metrics, entered = IngressMetrics("f"), asyncio.Event()

    async def waits(_scope: Scope, _receive: Receive, _send: Send) -> None:
        entered.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_message: Message) -> None:
        raise AssertionError("nobody is told anything")

    counted = RequestsCounted(waits, metrics)
    call = asyncio.create_task(counted({"type": "http", "method": "POST", "path": "/x"}, receive, send))
    await entered.wait()
    assert figure(metrics, "kedge_http_requests_in_flight") == 1
    call.cancel()
    await asyncio.wait([call])
    assert figure(metrics, "kedge_http_requests_total", status="left") == 1
    assert figure(metrics, "kedge_http_request_seconds_count") == 0


async def test_websockets_have_a_status_and_no_times() -> None:
    app, metrics = FastAPI(), IngressMetrics("f")

    @app.websocket("/socket")
    async def socket(connection: WebSocket) -> None:
        await connection.accept()
        await connection.close()

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(_message: Message) -> None:
        pass

    scope = {"type": "websocket", "path": "/socket", "headers": [], "query_string": b"", "subprotocols": []}
    await RequestsCounted(app, metrics)(scope, receive, send)
    found = "kedge_http_requests_total"
    assert figure(metrics, found, route="/socket", method="websocket", status="1xx") == 1
    assert figure(metrics, "kedge_http_request_seconds_count") == 0
