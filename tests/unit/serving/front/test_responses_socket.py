"""Responses over a WebSocket, with OpenAI's own client and message by message, on the turns of one replica."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.front.api.body_limits import BodyLimits
from serving.front.api.responses import websocket as responses_socket
from serving.front.api.rules import ApiRules
from serving.front.http import create_http_app
from serving.wire.turns import ErrorInfo, ServiceError, SessionInfo, TurnCall, TurnEvent, TurnTranscript
from tests.unit.serving.front.socket_client import RawSocket, opened
from tests.unit.serving.local_service import LocalService, http_server, local_service
from tests.unit.serving.responses_client import GREEDY, MOST, expected, said, user
from tests.unit.serving.sdk_clients import openai_at
from tests.unit.serving.telling_service import TellingService

WAIT_S = 20.0
MEBIBYTE = 1024 * 1024


class HeldTurns:
    """The service, but its turns wait for `go` before they run."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self.model = service.model
        self.asked: list[str] = []
        self.go = asyncio.Event()

    @asynccontextmanager
    async def run(self, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        self.asked.append(call.prompt.messages[-1]["content"])  # type: ignore[union-attr]
        await self.go.wait()
        async with self._service.run(call) as events:
            yield events

    async def session(self, session_id: str, *, tenant: str) -> SessionInfo | None:
        return await self._service.session(session_id, tenant=tenant)

    async def close_session(self, session_id: str, *, tenant: str) -> bool:
        return await self._service.close_session(session_id, tenant=tenant)


class BreakingService(TellingService):
    """A service that fails in the middle of an answer."""

    async def _events(self, call: TurnCall) -> AsyncIterator[TurnEvent]:
        async for event in super()._events(call):
            if event.finish is not None:
                event = TurnEvent(error=ErrorInfo(503, "replica_lost", "It is lost."))
            yield event

    async def transcript(self, session_id: str, *, tenant: str) -> list[TurnTranscript]:
        raise ServiceError(ErrorInfo(404, "session_not_found", f"{tenant} has no {session_id}."))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[LocalService]:
    async with local_service(tmp_path) as service, asyncio.timeout(WAIT_S):
        yield service


@pytest.fixture
def app_options() -> dict[str, Any]:
    return {"rules": ApiRules(body_limits=lambda: BodyLimits(size_bytes=MEBIBYTE))}


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_at(url) as client:
        yield client


@pytest.fixture
async def socket(url: str) -> AsyncIterator[RawSocket]:
    async with opened(url) as socket:
        yield socket


async def last(connection: Any) -> Any:
    """The response that ends next, as OpenAI's client reads it."""
    async for event in connection:
        assert event.type not in ("error", "response.failed"), event
        if event.type in ("response.completed", "response.incomplete"):
            return event.response
    return None


def shape(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The part of the events that is equal for equal responses. How the text is cut is not part of it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [(event["type"], event.get("output_index"), event.get("text")) for event in events]
    return [kind for kind, _ in itertools.groupby(kinds)]


async def test_the_events_are_those_of_a_stream(client: openai.AsyncOpenAI) -> None:
    asked = GREEDY | {"input": "My dog is called Rex.", "instructions": "Be short."}
    stream = await client.responses.create(stream=True, **asked)
    streamed = [event.to_dict() async for event in stream]
    async with client.responses.connect() as connection:
        await connection.response.create(**asked)
        told: list[dict[str, Any]] = []
        async for event in connection:
            told.append(event.to_dict())
            if event.type == "response.incomplete":
                break
    assert shape(told) == shape(streamed)
    assert told[-1]["response"]["output"][0]["content"] == streamed[-1]["response"]["output"][0]["content"]
    assert not any("stream_id" in event for event in told)


@pytest.mark.parametrize("store", [True, False])
async def test_responses_of_a_connection_go_on_from_one_another(
    client: openai.AsyncOpenAI, service: LocalService, store: bool
) -> None:
    items: list[dict[str, Any]] = []
    asked_before: Any = None
    before: Any = None
    async with client.responses.connect() as connection:
        for text in ("one", "two", "three"):
            items.append(user(text))
            previous = {} if before is None else {"previous_response_id": before.id}
            await connection.response.create(input=text, store=store, **GREEDY, **previous)
            response = await last(connection)
            assert response.output_text == expected(items)
            items.append(said(response))
            asked_before, before = before, response
    assert asked_before is not None
    cached = before.usage.input_tokens_details.cached_tokens
    assert cached >= asked_before.usage.input_tokens, "its KV was found, as a whole conversation's is"
    assert len(service.cluster.sessions()) == store
    if store:
        assert (await client.responses.retrieve(before.id)).output_text == before.output_text


async def test_what_is_not_stored_is_known_to_its_connection_alone(url: str) -> None:
    async with opened(url) as socket, opened(url) as other:
        first = await socket.response("one", store=False)
        for wrong in (other, socket):
            await wrong.create("two", previous_response_id=first["id"] if wrong is other else "resp_none")
            error = await wrong.error()
            assert error["status"] == 400
            assert error["error"]["code"] == "previous_response_not_found"
            assert error["error"]["param"] == "previous_response_id"
        second = await socket.response("two", store=False, previous_response_id=first["id"])
        await socket.create("again", previous_response_id=first["id"])
        assert (await socket.error())["error"]["code"] == "previous_response_not_found", "the newest alone"
        third = await other.response("on its own")
        assert (second["status"], third["status"]) == ("incomplete", "incomplete")


async def test_a_stored_response_goes_on_from_one_that_is_not(
    socket: RawSocket, client: openai.AsyncOpenAI
) -> None:
    first = await socket.response("one", store=False)
    second = await socket.response("two", previous_response_id=first["id"])
    third = await client.responses.create(input="three", previous_response_id=second["id"], **GREEDY)
    items = [user("one"), *first["output"], user("two"), *second["output"], user("three")]
    assert third.output_text == expected(items)


async def test_what_is_remembered_is_bounded(url: str) -> None:
    """The oldest are dropped if all of them together are larger than a message may be."""
    async with opened(url) as socket:
        large = {"store": False, "metadata": {"padding": "p" * 400_000}}
        first, second, third = [
            await socket.response(name, stream_id=name, **large) for name in ("a", "b", "c")
        ]
        await socket.create("on", store=False, previous_response_id=first["id"])
        assert (await socket.error())["error"]["code"] == "previous_response_not_found"
        await socket.response("on", store=False, previous_response_id=third["id"])
    assert second["status"] == "incomplete"


async def test_nothing_is_generated_where_only_the_state_is_prepared(
    socket: RawSocket, service: LocalService
) -> None:
    ready = await socket.response("one", generate=False, instructions="Be short.")
    assert (ready["status"], ready["output"], ready["usage"]["output_tokens"]) == ("completed", [], 0)
    assert service.cluster.sessions() == []
    on = await socket.response("two", previous_response_id=ready["id"], instructions="Be short.")
    assert on["output"][0]["content"][0]["text"] == expected([user("one"), user("two")], "Be short.")
    assert on["usage"]["input_tokens_details"]["cached_tokens"] > 0


BAD: list[tuple[str | bytes, str, str | None]] = [
    ("no json", "bad_request", None),
    ('{"type": "response.create", "input": "a", "temperature": NaN}', "bad_request", None),
    ("[1]", "invalid_request", None),
    (b"{}", "invalid_request", None),
    ("{}", "unknown_event_type", "type"),
    ('{"type": "response.steer"}', "unknown_event_type", "type"),
    ('{"type": ["response.create"]}', "unknown_event_type", "type"),
    ('{"type": "response.create"}', "invalid_request", "input"),
    ('{"type": "response.create", "input": 5}', "invalid_request", "input"),
    ('{"type": "response.create", "input": "a", "mood": 1}', "unknown_field", "mood"),
    ('{"type": "response.create", "input": "a", "background": true}', "unsupported_field", "background"),
    ('{"type": "response.create", "input": "a", "generate": "no"}', "invalid_request", "generate"),
    ('{"type": "response.create", "input": "a", "stream_id": ""}', "invalid_stream_id", "stream_id"),
    ('{"type": "response.create", "input": "a", "stream_id": 5}', "invalid_stream_id", "stream_id"),
    ('{"type": "response.create", "input": "a", "model": "other"}', "model_not_found", "model"),
    ('{"type": "response.create", "input": "' + "a " * 600 + '"}', "context_length_exceeded", "input"),
    ('{"type": "response.create", "input": "' + "a" * MEBIBYTE + '"}', "request_entity_too_large", None),
    ('{"type": "response.create", "input": [' + "[]," * 40_000 + "1]}", "request_entity_too_large", None),
]


async def test_a_bad_message_is_told_and_ends_nothing(socket: RawSocket) -> None:
    for message, code, param in BAD:
        await socket.wire.send(message)
        event = await socket.error()
        assert (event["error"]["code"], event["error"]["param"]) == (code, param), event
        assert event["status"] in (400, 404, 413)
    assert (await socket.response("still here"))["status"] == "incomplete"


async def test_fields_of_http_that_say_nothing_here_may_be_sent(socket: RawSocket) -> None:
    """Clients send the fields that they have for HTTP."""
    response = await socket.response(
        "a", stream=True, background=False, stream_options={"include_obfuscation": False}
    )
    assert response["background"] is False


async def test_unknown_fields_that_may_pass_are_told(service: LocalService) -> None:
    app = create_http_app(service, rules=ApiRules(ignore_unknown_fields=True))
    async with http_server(app) as url, opened(url) as socket:
        await socket.create("a", mood=1)
        first, *others = await socket.events()
    assert (first["type"], first["x-kedge-ignored-fields"]) == ("response.created", "mood")
    assert not any("x-kedge-ignored-fields" in event for event in others)


async def test_lanes_run_at_once_and_each_in_order(service: LocalService) -> None:
    held: Any = HeldTurns(service)
    async with http_server(create_http_app(held)) as url, opened(url) as socket:
        for text, lane in (("first", "a"), ("second", "a"), ("other", "b"), ("unnamed", None)):
            await socket.create(text, store=False, **({} if lane is None else {"stream_id": lane}))
        while len(held.asked) < 3:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert sorted(held.asked) == ["first", "other", "unnamed"]
        held.go.set()
        ended: list[str | None] = []
        while len(ended) < 4:
            event = await socket.event()
            if event["type"] == "response.incomplete":
                ended.append(event.get("stream_id"))
        assert held.asked[-1] == "second"
        assert sorted(map(str, ended)) == ["None", "a", "a", "b"]


async def test_only_so_many_responses_run_at_once(
    service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_socket, "MOST_RESPONSES", 2)
    held: Any = HeldTurns(service)
    async with http_server(create_http_app(held)) as url, opened(url) as socket:
        for lane in "abc":
            await socket.create(lane, stream_id=lane)
        await asyncio.sleep(0.2)
        assert held.asked == ["a", "b"]
        held.go.set()
        for _ in "abc":
            assert (await socket.events())[-1]["type"] == "response.incomplete"


async def test_a_connection_has_only_so_many_lanes(
    socket: RawSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses_socket, "MOST_LANES", 1)
    await socket.response("a", stream_id="first")
    await socket.create("a", stream_id="second")
    assert (await socket.error())["error"]["code"] == "websocket_stream_limit_reached"
    for lane in ({"stream_id": "first"}, {}):
        await socket.response("a", **lane)


async def test_a_fork_goes_on_from_another_lane(socket: RawSocket) -> None:
    first = await socket.response("one", store=False, stream_id="main")
    fork = await socket.response("left", store=False, stream_id="fork", previous_response_id=first["id"])
    main = await socket.response("right", store=False, stream_id="main", previous_response_id=first["id"])
    for text, response in (("left", fork), ("right", main)):
        items = [user("one"), *first["output"], user(text)]
        assert response["output"][0]["content"][0]["text"] == expected(items)


async def test_an_answer_that_breaks_off_is_a_failed_response() -> None:
    service: Any = BreakingService("some ", "text")
    async with http_server(create_http_app(service)) as url, opened(url) as socket:
        await socket.create("one", store=False, stream_id="lane")
        *_, last_event = await socket.events()
        assert last_event["type"] == "response.failed"
        assert last_event["response"]["error"]["code"] == "server_error"
        assert last_event["stream_id"] == "lane"
        await socket.create("on", store=False, previous_response_id=last_event["response"]["id"])
        assert (await socket.error())["error"]["code"] == "previous_response_not_found"


async def test_leaving_ends_the_turn(url: str, service: LocalService) -> None:
    async with opened(url) as socket:
        await socket.create("one", store=False, max_output_tokens=480)
        assert (await socket.event())["type"] == "response.created"
    while not service.ended:
        await asyncio.sleep(0.01)
    await service.rig.books_are_empty()


async def test_a_large_message_is_read_as_a_large_body_is(socket: RawSocket) -> None:
    response = await socket.response("a", user="u" * 200_000)
    assert len(response["user"]) == 200_000
    message = {"type": "response.create", "input": "a", "user": "u" * 200_000, "mood": 1}
    await socket.wire.send(json.dumps(message))
    assert (await socket.error())["error"]["param"] == "mood"


def test_five_tokens_are_asked_for() -> None:
    """The function `expected` answers with that many tokens."""
    assert MOST == 5
