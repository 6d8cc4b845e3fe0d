"""Real calls over HTTP, and their log records in the JSON of Ray Serve."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray._common.formatters import JSONFormatter
from ray.serve.schema import LoggingConfig

from serving.front.http import create_http_app
from serving.front.recorder import Recorder
from serving.keys import KeyRing
from serving.logs.audit_log import audit_event
from serving.logs.call_facts import CALL_FACTS, CallFacts, CallFactsFilter
from serving.logs.serve_log import OURS, SERVE_LOGGER, deployment_options, log_with_serve, logging_options
from serving.settings.record_args import LogsArgs
from serving.wire.turns import SessionTurn
from tests.unit.serving.local_replicas import LocalReplicas
from tests.unit.serving.local_service import client_of, local_service
from tests.unit.serving.replica_rig import call
from tests.unit.serving.traced_service import Traced, traced_service

SECRET = "the cat is called Tibbles"
ALL = LogsArgs(format="json", access="all")
CHAT = "/v1/chat/completions"


class ServeLog:
    """What reaches Ray Serve's log."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    def records(self, logger: str = "") -> list[dict[str, Any]]:
        records = [json.loads(line) for line in self.text.splitlines()]
        return [record for record in records if record["name"].startswith(logger)]

    def one(self, logger: str) -> dict[str, Any]:
        (record,) = self.records(logger)
        return record


@pytest.fixture
def log() -> Iterator[ServeLog]:
    """Ray Serve's logger, set up as in a replica's process, but without a file."""
    serve_logger = logging.getLogger(SERVE_LOGGER)
    ours = [logging.getLogger(name) for name in OURS]
    before = [
        (each, each.level, each.propagate, each.handlers[:], each.filters[:])
        for each in [serve_logger, *ours]
    ]
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    formatter = JSONFormatter()
    formatter.set_additional_log_standard_attrs(logging_options(ALL)["additional_log_standard_attrs"])
    handler.setFormatter(formatter)
    serve_logger.handlers = [handler]
    serve_logger.setLevel(logging.INFO)
    log_with_serve(ALL)
    yield ServeLog(stream)
    for each, level, propagate, handlers, filters in before:
        each.setLevel(level)
        each.propagate, each.handlers, each.filters = propagate, handlers, filters


@asynccontextmanager
async def served(directory: Path, args: LogsArgs = ALL, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with local_service(directory) as service:
        yield client_of(create_http_app(service, recorder=Recorder(args), **options))


def body(**fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": SECRET}
    return {"model": "null-model", "messages": [message], "max_tokens": 4, "temperature": 0} | fields


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[Traced]:
    async with traced_service(tmp_path, ALL) as traced:
        yield traced


async def test_a_request_has_one_line_that_says_what_came_of_it(traced: Traced, log: ServeLog) -> None:
    headers = {"x-request-id": "req-1", "x-session-id": "s1", "x-tenant-id": "acme"}
    reply = await traced.client.post(CHAT, json=body(), headers=headers)
    line = log.one("kedge.access")
    usage = reply.json()["usage"]
    expected = {
        "levelname": "INFO",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "response_bytes": len(reply.content),
        "request_id": "req-1",
        "response_id": reply.json()["id"],
        "tenant": "acme",
        "session_id": "s1",
        "turn": 0,
        "epoch": 1,
        "input_tokens": usage["prompt_tokens"],
        "cached_tokens": 0,
        "output_tokens": 4,
    }
    assert {name: line.get(name) for name in expected} == expected
    assert line["replica_id"] in ("a", "b")
    assert line["duration_ms"] > 0
    assert line["message"].startswith(f"POST {CHAT} 200 ")
    (request,) = (await traced.sent()).named(f"POST {CHAT}")
    assert line["trace_id"] == request.trace_id
    assert request.attributes["kedge.request_id"] == "req-1"


async def test_a_stream_is_logged_when_it_has_ended(tmp_path: Path, log: ServeLog) -> None:
    async with served(tmp_path) as client:
        reply = await client.post(CHAT, json=body(stream=True))
    line = log.one("kedge.access")
    assert line["response_bytes"] == len(reply.content) > 0


async def test_several_answers_are_added_up(traced: Traced, log: ServeLog) -> None:
    reply = await traced.client.post(CHAT, json=body(n=3, temperature=1))
    assert log.one("kedge.access")["output_tokens"] == reply.json()["usage"]["completion_tokens"]


async def test_routes_are_templates_and_name_their_session(tmp_path: Path, log: ServeLog) -> None:
    async with served(tmp_path) as client:
        assert (await client.get("/v1/kedge/sessions/s9")).status_code == 404
        assert (await client.get("/nowhere/at/all")).status_code == 404
    session, nowhere = log.records("kedge.access")
    assert (session["route"], session["session_id"]) == ("/v1/kedge/sessions/{session_id:path}", "s9")
    assert nowhere["route"] == "-"
    assert "output_tokens" not in session


@pytest.mark.parametrize("access", ["off", "errors"])
async def test_only_what_is_asked_for_is_logged(tmp_path: Path, log: ServeLog, access: Any) -> None:
    async with served(tmp_path, LogsArgs(access=access)) as client:
        await client.post(CHAT, json=body())
        await client.post(CHAT, json={})
    assert log.records("kedge.access") == []


async def test_an_error_of_ours_is_logged_as_one(
    tmp_path: Path, log: ServeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalReplicas, "turn", lambda *_args: 1 / 0)
    async with served(tmp_path, LogsArgs(access="errors")) as client:
        reply = await client.post(CHAT, json=body(), headers={"x-session-id": "s"})
    assert reply.status_code == 500
    line = log.one("kedge.access")
    assert (line["levelname"], line["status"]) == ("ERROR", 500)
    (failure,) = log.records("serving")
    assert failure["request_id"] == line["request_id"] == reply.headers["x-request-id"]
    assert "ZeroDivisionError" in failure["exc_text"]


async def test_replies_have_the_requests_id(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        given = await client.get("/health", headers={"x-request-id": "mine"})
        made = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        refused = await client.post(CHAT, json={}, headers={"x-request-id": "mine"})
    assert given.headers.get_list("x-request-id") == ["mine"]
    assert refused.headers["x-request-id"] == "mine"
    assert made[0] != made[1]


async def test_ray_serve_tells_it_where_it_answers(tmp_path: Path) -> None:
    """Ray Serve adds this header itself, so it would be there twice."""
    async with local_service(tmp_path) as service:
        app = create_http_app(service, recorder=Recorder(tells_id=False))
        assert "x-request-id" not in (await client_of(app).get("/health")).headers


async def test_nothing_that_was_said_is_logged(traced: Traced, log: ServeLog) -> None:
    for fields in ({}, {"stream": True}, {"max_tokens": 10_000}, {"temperature": SECRET}):
        await traced.client.post(CHAT, json=body(**fields), headers={"x-session-id": "s"})
    assert len(log.records("kedge.access")) == 4
    assert SECRET not in log.text


async def test_what_was_said_is_logged_if_it_is_asked_for(tmp_path: Path, log: ServeLog) -> None:
    async with traced_service(tmp_path, LogsArgs(access="all", content=True)) as traced:
        reply = await traced.client.post(CHAT, json=body())
    line = log.one("kedge.access")
    assert line["prompt"] == [body()["messages"]]
    assert line["answer"] == reply.json()["choices"][0]["message"]["content"]


async def test_refusals_and_what_operators_do_are_audit_events(tmp_path: Path, log: ServeLog) -> None:
    keys = KeyRing({"KEDGE_API_KEYS": "k1=acme", "KEDGE_OPERATOR_KEYS": "boss"})
    as_acme, as_boss = {"authorization": "Bearer k1"}, {"authorization": "Bearer boss"}
    async with local_service(tmp_path) as service:
        another = replace(service.rig.heartbeats.status(), replica_id="replica-b")
        service.cluster.register_replica(another)
        client = client_of(create_http_app(service, keys=keys))
        await client.post(CHAT, json=body(), headers={"authorization": "Bearer wrong-key"})
        await client.get("/v1/kedge/audit", headers=as_acme)
        await client.get("/v1/kedge/sessions", headers=as_acme | {"x-tenant-id": "other"})
        await client.post(CHAT, json=body(), headers=as_boss | {"x-session-id": "s", "x-tenant-id": "acme"})
        await client.delete("/v1/kedge/sessions/s", headers=as_boss | {"x-tenant-id": "acme"})
        await client.post("/v1/kedge/replicas/replica-a/drain", headers=as_boss)
    events = log.records("kedge.audit")
    assert [(event["event"], event["levelname"]) for event in events] == [
        ("key_refused", "WARNING"),
        ("operator_refused", "WARNING"),
        ("tenant_refused", "WARNING"),
        ("session_closed_by_operator", "INFO"),
        ("replica_drained", "INFO"),
    ]
    assert (events[0]["path"], events[1]["tenant"], events[2]["asked_for"]) == (CHAT, "acme", "other")
    assert (events[3]["session_id"], events[3]["tenant"]) == ("s", "acme")
    assert events[4]["replica_id"] == "replica-a"
    assert all(event["request_id"] for event in events)
    assert "wrong-key" not in log.text


async def test_sessions_closed_by_their_clients_are_no_audit_event(tmp_path: Path, log: ServeLog) -> None:
    async with served(tmp_path) as client:
        await client.post(CHAT, json=body(), headers={"x-session-id": "s"})
        assert (await client.delete("/v1/kedge/sessions/s")).status_code == 204
    assert log.records("kedge.audit") == []


def test_records_at_a_replica_say_which_turn_they_are_of(log: ServeLog) -> None:
    turn = call([1], None, request_id="chatcmpl-1", http_request_id="req-1", tenant="acme")
    turn = type(turn)(
        **{f: getattr(turn, f) for f in turn.__struct_fields__} | {"session": SessionTurn("acme s1")}
    )
    token = CALL_FACTS.set(CallFacts.at_replica(turn, "replica-a", 3))
    try:
        logging.getLogger("serving.replica.turn_commits").warning("a turn waits")
    finally:
        CALL_FACTS.reset(token)
    line = log.one("serving.replica")
    told = {
        name: line[name]
        for name in ("request_id", "response_id", "session_id", "replica_id", "epoch", "tenant")
    }
    assert told == {
        "request_id": "req-1",
        "response_id": "chatcmpl-1",
        "session_id": "s1",
        "replica_id": "replica-a",
        "epoch": 3,
        "tenant": "acme",
    }
    logging.getLogger("engine.anything").info("of no call")
    assert not {"request_id", "session_id"} & log.one("engine").keys()


def test_nobody_writes_a_line_of_the_audit_log_by_a_path(caplog: pytest.LogCaptureFixture) -> None:
    """A path is decoded before it is logged, and needs no key."""
    with caplog.at_level(logging.INFO, "kedge.audit"):
        audit_event("key_refused", path="/x\nINFO -- replica_drained replica_id=r7\x1b[31m", client="::1")
    (record,) = caplog.records
    said = record.getMessage()
    assert said.isprintable()
    assert said.startswith('key_refused path="/x\\nINFO')
    assert said.endswith(" client=::1")


async def test_a_refused_call_writes_no_more_than_a_line(tmp_path: Path, log: ServeLog) -> None:
    """Its whole path was in the audit log, and so anybody filled that."""
    async with local_service(tmp_path) as service:
        client = client_of(create_http_app(service, keys=KeyRing({"KEDGE_API_KEYS": "k1"})))
        assert (await client.get("/v1/" + "%01" * 5000)).status_code == 401
    assert log.one("kedge.audit")["path"] == "/v1/" + "\x01" * 252
    assert len(log.text) < 5000


def test_the_audit_log_does_not_depend_on_the_level(log: ServeLog) -> None:
    log_with_serve(LogsArgs(level="ERROR", format="json"))
    audit_event("replica_drained", replica_id="r1")
    for name in ("serving.front", "kedge.engine"):
        logging.getLogger(name).info("left out")
    assert [record["event"] for record in log.records()] == ["replica_drained"]


def test_what_a_record_says_itself_counts() -> None:
    record = logging.makeLogRecord({"session_id": "its own"})
    token = CALL_FACTS.set(CallFacts(session_id="the call's"))
    try:
        assert CallFactsFilter().filter(record)
    finally:
        CALL_FACTS.reset(token)
    assert record.session_id == "its own"


def test_where_nothing_is_asked_for_ray_serves_own_settings_count() -> None:
    assert deployment_options(LogsArgs()) == {}
    assert deployment_options(ALL) == {"logging_config": logging_options(ALL)}


@pytest.mark.parametrize("args", [LogsArgs(), ALL, LogsArgs(format="json", level="DEBUG")])
def test_ray_serve_takes_the_options(args: LogsArgs) -> None:
    config = LoggingConfig(**logging_options(args))
    assert (config.encoding == "JSON") == (args.format == "json")
    assert config.log_level == args.level
