"""Real turns over HTTP, and the spans that a collector gets of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from opentelemetry.sdk.trace import TracerProvider

from serving.front import session_owners
from serving.trace.turn_traces import UNTRACED
from tests.unit.serving.failover_rig import behind
from tests.unit.serving.local_service import MODEL, LocalService
from tests.unit.serving.otlp_collector import Collector, Span
from tests.unit.serving.traced_service import Traced, over_the_wire, traced_service

SECRET = "the cat is called Tibbles"
TRACE_ID, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CLIENTS_SPAN}-01"
CHAT = "POST /v1/chat/completions"
TURN = "chat null-model"
WHOLE_TURN = f"""\
{CHAT}
  parse
  {TURN}
    place
    dispatch
      turn
        begin
        queue
        prefill
        decode"""
COMMIT = "\n        commit"


@pytest.fixture
async def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Traced]:
    async with traced_service(tmp_path) as traced:
        over_the_wire(monkeypatch, traced.failover)
        yield traced


def body(**fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": SECRET}
    return {"model": "null-model", "messages": [message], "max_tokens": 8, "temperature": 0} | fields


async def chat(traced: Traced, headers: dict[str, str] | None = None, **fields: Any) -> Collector:
    reply = await traced.client.post("/v1/chat/completions", json=body(**fields), headers=headers or {})
    assert reply.status_code == 200, reply.text
    return await traced.sent()


async def stream(traced: Traced, headers: dict[str, str] | None = None, **fields: Any) -> Collector:
    fields = body(stream=True, **fields)
    async with traced.client.stream("POST", "/v1/chat/completions", json=fields, headers=headers) as reply:
        assert reply.status_code == 200
        lines = [line async for line in reply.aiter_lines()]
    assert "data: [DONE]" in lines
    return await traced.sent()


def is_within(inner: Span, outer: Span) -> bool:
    return outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


async def test_a_chat_completion_is_one_tree(traced: Traced) -> None:
    collector = await chat(traced)
    assert collector.tree() == WHOLE_TURN
    assert collector.paths == {"/v1/traces"}
    assert len({span.trace_id for span in collector.spans}) == 1
    assert {span.service for span in collector.spans} == {"kedge-ingress", "kedge-replica"}
    assert not any(span.failed for span in collector.spans)
    request = collector.one(CHAT)
    assert request.attributes["http.route"] == "/v1/chat/completions"
    assert request.attributes["http.response.status_code"] == 200


async def test_a_turn_has_the_names_of_the_conventions(traced: Traced) -> None:
    turn = (await chat(traced, top_p=0.5, seed=3)).one(TURN)
    told = turn.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "null-model"
    assert told["gen_ai.request.max_tokens"] == 8
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.0, 0.5)
    assert told["gen_ai.request.seed"] == 3
    assert told["gen_ai.response.id"].startswith("chatcmpl-")
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["gen_ai.usage.input_tokens"] > 0
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < turn.took_ms / 1000


async def test_a_turn_with_an_adapter_is_one_of_that_model(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalService, "model", structs.replace(MODEL, adapters={"a": "org/a"}))
    told = (await chat(traced, model="a")).one("chat a").attributes
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == "a"


async def test_the_stages_follow_each_other_and_add_up(traced: Traced) -> None:
    collector = await chat(traced)
    turn = collector.one("turn")
    begin, queue, prefill, decode = collector.children(turn.span_id)
    assert begin.end_ns == queue.start_ns
    assert queue.end_ns == prefill.start_ns
    assert prefill.end_ns == decode.start_ns
    assert all(is_within(stage, turn) for stage in (begin, queue, prefill, decode))
    for name, stage in (("time_in_queue", queue), ("time_in_model_prefill", prefill)):
        assert turn.attributes[f"gen_ai.latency.{name}"] == pytest.approx(stage.took_ms / 1000, abs=1e-6)
    first_token_s = (prefill.end_ns - turn.start_ns) / 1e9
    assert turn.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(first_token_s, abs=1e-3)
    assert is_within(turn, collector.one("dispatch"))


async def test_a_turn_is_in_the_queue_until_the_engine_lets_it_run(tmp_path: Path) -> None:
    async with traced_service(tmp_path, max_running=1) as traced:
        posts = (traced.client.post("/v1/chat/completions", json=body(seed=seed)) for seed in (1, 2))
        await asyncio.gather(*posts)
        collector = await traced.sent()
    ran, waited = collector.named("turn")
    decode, queue, prefill = collector.children(ran.span_id)[-1], *collector.children(waited.span_id)[1:3]
    assert [decode.name, queue.name, prefill.name] == ["decode", "queue", "prefill"]
    assert queue.start_ns < decode.start_ns < queue.end_ns
    assert prefill.took_ms > 0


async def test_a_stream_has_the_same_tree(traced: Traced) -> None:
    collector = await stream(traced)
    assert collector.tree() == WHOLE_TURN
    assert is_within(collector.one(TURN), collector.one(CHAT))


async def test_a_turn_of_a_session_is_committed_and_names_it(traced: Traced) -> None:
    collector = await chat(traced, {"x-session-id": "s1", "x-tenant-id": "acme"})
    assert collector.tree() == WHOLE_TURN + COMMIT
    turn, there = collector.one(TURN), collector.one("turn")
    assert turn.attributes["gen_ai.conversation.id"] == "s1"
    assert turn.attributes["kedge.tenant"] == "acme"
    assert turn.attributes["kedge.turn"] == there.attributes["kedge.turn"] == 0
    assert there.attributes["kedge.epoch"] == collector.one("dispatch").attributes["kedge.epoch"] == 1
    assert there.attributes["kedge.replica_id"] in ("a", "b")


async def test_it_goes_on_a_clients_trace(traced: Traced) -> None:
    collector = await chat(traced, {"traceparent": TRACEPARENT})
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert collector.one(CHAT).parent_id == CLIENTS_SPAN


async def test_a_clients_trace_that_is_not_kept_is_not_kept_here(traced: Traced) -> None:
    collector = await chat(traced, {"traceparent": TRACEPARENT[:-1] + "0"})
    assert collector.spans == []


async def test_a_bad_traceparent_begins_a_trace(traced: Traced) -> None:
    collector = await chat(traced, {"traceparent": "00-nonsense"})
    assert collector.tree() == WHOLE_TURN


async def test_it_joins_the_span_that_is_current_as_rays_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own tracing on, Ray Serve puts a span around the application's call. It uses a provider of its own for
    that."""
    rays = TracerProvider(shutdown_on_exit=False).get_tracer("ray")
    async with traced_service(tmp_path) as traced:
        from serving.trace.requests import RequestsTraced

        plain = RequestsTraced.__call__

        async def within_rays_span(self: RequestsTraced, *asgi: Any) -> None:
            with rays.start_as_current_span("replica_handle_request") as span:
                seen.append(f"{span.get_span_context().span_id:016x}")
                await plain(self, *asgi)

        seen: list[str] = []
        monkeypatch.setattr(RequestsTraced, "__call__", within_rays_span)
        collector = await chat(traced, {"traceparent": TRACEPARENT})
        assert collector.one(CHAT).parent_id == seen[-1]


async def test_a_replica_that_is_lost_is_an_event_and_a_failed_attempt(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.005)
    traced.failover.open_session("s1")
    traced.failover.replicas.losses["a"] = behind(3)
    collector = await stream(traced, {"x-session-id": "s1"}, max_tokens=30)
    turn = collector.one(TURN)
    assert not turn.failed
    assert turn.events == {
        "failover": {"reason": "replica_lost"},
        "takeover": {"kedge.replica_id": "b"},
    }
    lost, taken = collector.named("dispatch")
    assert (lost.attributes["kedge.replica_id"], lost.failed) == ("a", True)
    assert lost.attributes["error.type"] == "replica_lost"
    assert (taken.attributes["kedge.replica_id"], taken.failed) == ("b", False)
    assert taken.attributes["kedge.epoch"] == lost.attributes["kedge.epoch"] + 1
    there = {span.attributes["kedge.replica_id"]: span for span in collector.named("turn")}
    assert there["a"].parent_id == lost.span_id
    assert there["b"].parent_id == taken.span_id
    assert 0 < there["b"].attributes["kedge.resumed_tokens"] < 30
    assert there["a"].attributes["kedge.client_left"]


async def test_a_refused_turn_is_an_error_by_its_code(traced: Traced) -> None:
    reply = await traced.client.post("/v1/chat/completions", json=body(max_tokens=8) | {"messages": []})
    assert reply.status_code == 400
    long = body(messages=[{"role": "user", "content": "x" * 4000}])
    refused = await traced.client.post("/v1/chat/completions", json=long)
    assert refused.status_code == 400
    collector = await traced.sent()
    turn = collector.one(TURN)
    assert turn.failed
    assert turn.attributes["error.type"] == refused.json()["error"]["code"]
    assert turn.events == {}, "nobody tried again"
    bad, ran = collector.named(CHAT)
    assert bad.attributes["http.response.status_code"] == ran.attributes["http.response.status_code"] == 400
    assert not bad.failed, "a client's fault is none of the server's"
    assert collector.children(bad.span_id) == []


async def test_what_nobody_expected_is_an_event_of_the_spans_that_it_ends(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(*_: Any) -> str:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(traced.failover.replicas, "pick", pick)
    reply = await traced.client.post("/v1/chat/completions", json=body())
    assert reply.status_code == 500
    collector = await traced.sent()
    place = collector.one("place")
    assert place.failed
    assert place.events["exception"]["exception.type"] == "ZeroDivisionError"
    assert "in pick" in place.events["exception"]["exception.stacktrace"]
    assert collector.one(TURN).attributes["error.type"] == "ZeroDivisionError"
    assert collector.one(CHAT).failed


async def test_a_session_that_has_moved_is_no_failure(traced: Traced) -> None:
    traced.failover.open_session("s1")
    await traced.client.post("/v1/chat/completions", json=body(), headers={"x-session-id": "s1"})
    owners = traced.failover.owners._cache
    owner = owners.get("s1")
    assert owner is not None
    owners.put("s1", replace(owner, epoch=owner.epoch + 7))
    next_turn = {"messages": [{"role": "user", "content": "and?"}]}
    collector = await chat(traced, {"x-session-id": "s1"}, **next_turn)
    assert [turn.events for turn in collector.named(TURN)] == [{}, {}]
    attempts = [span for span in collector.named("dispatch") if "kedge.moved" in span.attributes]
    assert [span.failed for span in attempts] == [False]


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_health_checks_and_scrapes_have_no_spans(tmp_path: Path, prefix: str) -> None:
    """Behind a `route_prefix` they had one each."""
    async with traced_service(tmp_path, root_path=prefix) as traced:
        for path in ("/health", "/ping", "/metrics"):
            assert (await traced.client.get(path)).status_code == 200
        assert (await traced.sent()).spans == []


async def test_a_route_is_named_by_its_template(traced: Traced) -> None:
    await traced.client.get("/v1/kedge/sessions/some-id")
    assert (await traced.sent()).tree() == "GET /v1/kedge/sessions/{session_id:path}"


async def test_nothing_that_was_said_is_in_a_span(traced: Traced) -> None:
    reply = await traced.client.post("/v1/chat/completions", json=body(), headers={"x-session-id": "s"})
    answer = reply.json()["choices"][0]["message"]["content"]
    sent = b"".join((await traced.sent()).raw)
    assert sent
    assert SECRET.encode() not in sent
    assert answer.encode() not in sent


async def test_what_was_said_is_there_if_it_is_asked_for(tmp_path: Path) -> None:
    async with traced_service(tmp_path, record_content=True) as traced:
        reply = await traced.client.post("/v1/chat/completions", json=body())
        turn = (await traced.sent()).one(TURN)
    (asked,) = json.loads(turn.attributes["gen_ai.input.messages"])
    assert asked == {"role": "user", "parts": [{"type": "text", "content": SECRET}]}
    (answered,) = json.loads(turn.attributes["gen_ai.output.messages"])
    assert answered["parts"][0]["content"] == reply.json()["choices"][0]["message"]["content"]
    assert answered["finish_reason"] == "length"


async def test_a_ratio_of_nothing_keeps_only_what_clients_keep(tmp_path: Path) -> None:
    async with traced_service(tmp_path, sample_ratio=0.0) as traced:
        await traced.client.post("/v1/chat/completions", json=body())
        collector = await chat(traced, {"traceparent": TRACEPARENT})
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}


def test_an_untraced_turn_makes_nothing() -> None:
    """It makes not even an object: one shared object takes all calls."""
    assert UNTRACED.turn(None) is UNTRACED  # type: ignore[arg-type]
    assert UNTRACED.placing() is UNTRACED.at("a", 1) is UNTRACED.committing()
    assert UNTRACED.on_admitted is None
