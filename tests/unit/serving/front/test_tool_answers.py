"""Answers with calls, whole and streamed, as OpenAI's clients read them. The test gives the model's words."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openai.lib.streaming._deltas import accumulate_delta

from serving.front.api.answers.reader import AnswerPart, scope_of
from serving.front.api.answers.tools import ToolUse
from serving.front.api.openai.chat_answers import ChatReader
from serving.front.http import create_http_app
from serving.text.tool_calls.formats import JSON_FORMATS, FormatName
from serving.wire.turns import SessionTurn, TurnCall, TurnEvent, TurnFinish
from tests.unit.serving.local_service import client_of
from tests.unit.serving.replica_rig import call
from tests.unit.serving.telling_service import CHAT, STOP, TOOL, WEATHER, TellingService
from tests.unit.serving.tool_texts import cut, texts

ASKED = {"role": "user", "content": "What is the weather in Bern?"}


async def answer(
    service: TellingService, headers: dict[str, str] | None = None, **body: Any
) -> dict[str, Any]:
    async with client_of(create_http_app(service)) as client:
        asked = {"messages": [ASKED], "tools": [TOOL], **body}
        reply = await client.post(CHAT, json=asked, headers=headers)
        assert reply.status_code == 200, reply.text
        choice: dict[str, Any] = reply.json()["choices"][0]
        return choice


async def chunks(service: TellingService, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    async with client_of(create_http_app(service)) as client:
        asked = {"messages": [ASKED], "tools": [TOOL], "stream": True}
        lines = (await client.post(CHAT, json=asked, headers=headers)).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [event["choices"][0] for event in events]


async def test_a_call_is_told_as_one() -> None:
    choice = await answer(TellingService(WEATHER), {"x-session-id": "s"})
    assert choice["finish_reason"] == "tool_calls"
    (told,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None}
    assert told.pop("id").isalnum()
    function = {"name": "get_weather", "arguments": '{"city": "Bern"}'}
    assert told == {"type": "function", "function": function}


async def test_a_stream_has_id_and_name_first_then_arguments() -> None:
    service = TellingService("Let me see. ", *WEATHER)
    told = await chunks(service)
    deltas = [choice["delta"] for choice in told]
    assert deltas[0] == {"role": "assistant", "content": "Let me see."}
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(entries) == 1 and entries[0]["index"] == 0 for entries in calls)
    first, *rest = [entries[0] for entries in calls]
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "get_weather", "arguments": "{"}
    assert all(
        set(entry) == {"index", "function"} and set(entry["function"]) == {"arguments"} for entry in rest
    )
    assert len(rest) == len('"city": "Bern"}')
    assert [choice["finish_reason"] for choice in told] == [None] * (len(told) - 1) + ["tool_calls"]
    assert all("content" not in delta for delta in deltas[1:])


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (TurnFinish("stop", 2), "stop"),
        (TurnFinish("length"), "length"),
        (TurnFinish("abort"), "abort"),
    ],
)
async def test_how_an_answer_ends_within_a_call(finish: TurnFinish, reason: str) -> None:
    cut_off = WEATHER.partition("rn")[0]
    choice = await answer(TellingService(cut_off, finish=finish))
    assert choice["finish_reason"] == reason
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Be'


@pytest.mark.parametrize(
    "text", ["", "sunny", " <tool_call> is a tag", WEATHER.replace('"', "'"), "<tool_call>", '{"name": "f"}']
)
async def test_what_is_no_call_is_content(text: str) -> None:
    choice = await answer(TellingService(text))
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": text}, "stop")
    streamed = await chunks(TellingService(*text))
    assert "".join(each["delta"].get("content", "") for each in streamed) == text
    assert streamed[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("body", [{"tools": None}, {"tool_choice": "none"}])
async def test_without_tools_to_read_for_the_text_is_the_content(body: dict[str, Any]) -> None:
    service = TellingService(WEATHER)
    choice = await answer(service, **body)
    assert (choice["message"]["content"], choice["finish_reason"]) == (WEATHER, "stop")
    assert service.calls[0].shown_tokens == ()


def reader(name: FormatName, turn: TurnCall) -> ChatReader:
    return ChatReader(scope_of(turn), ToolUse((), "auto", True, name), None)


def in_session(session_id: str, request_id: str = "r", tenant: str = "") -> TurnCall:
    return replace(call([1], request_id=request_id, tenant=tenant), session=SessionTurn(session_id))


def whole(text: str, turn: TurnCall, turn_index: int | None = 3, name: FormatName = "hermes") -> AnswerPart:
    return reader(name, turn).read(TurnEvent(text, finish=STOP, turn_index=turn_index))


def test_ids_follow_from_the_turn() -> None:
    def ids(turn: TurnCall, turn_index: int | None) -> tuple[str | None, ...]:
        return tuple(each.call_id for each in whole(WEATHER + WEATHER, turn, turn_index).calls)

    turn = in_session("s")
    assert ids(turn, 3) == ids(in_session("s", "another"), 3), "a replay has a request of its own"
    others = [
        ids(turn, 4),
        ids(in_session("t"), 3),
        ids(in_session("s", tenant="t"), 3),
        ids(call([1], request_id="r-0"), None),
        ids(call([1], request_id="r-1"), None),
    ]
    every = [each for pair in (ids(turn, 3), *others) for each in pair]
    assert len(set(every)) == len(every)
    assert all(len(each) == 9 and each.isalnum() for each in every)


def test_an_id_that_the_model_writes_is_the_calls() -> None:
    """The call is rendered with the id that the model wrote when a client sends it back. If the model's id cannot be
    used, the call gets an id of its own."""
    text = "[TOOL_CALLS]f[CALL_ID]aB3dEfgh9[ARGS]{}[TOOL_CALLS]f[CALL_ID]aB3dEfgh9[ARGS]{}"
    first, second = (each.call_id for each in whole(text, in_session("s"), name="mistral_call_id").calls)
    assert first == "aB3dEfgh9"
    assert second == whole(WEATHER + WEATHER, in_session("s")).calls[1].call_id


@settings(max_examples=200, deadline=None, print_blob=True)
@given(st.data())
def test_streams_add_up_to_the_whole(data: st.DataObject) -> None:
    """They are added up as the openai client does it, however the events are cut."""
    name = data.draw(st.sampled_from(sorted(JSON_FORMATS)))
    text = data.draw(texts(name))
    pieces = cut(text, data.draw(st.lists(st.integers(0, max(len(text), 1)), max_size=6)))
    follows = reader(name, in_session("s"))
    added: dict[object, object] = {}
    for number, piece in enumerate(pieces):
        finish = STOP if number == len(pieces) - 1 else None
        part = follows.read(TurnEvent(piece, finish=finish, turn_index=3))
        delta = follows.delta(part, None, ended=finish is not None)
        added = accumulate_delta(added, msgspec.to_builtins(delta))
    answered = reader(name, in_session("s")).message(whole(text, in_session("s"), name=name))
    expected = msgspec.to_builtins(answered)
    calls = [{k: v for k, v in each.items() if k != "index"} for each in added.get("tool_calls", [])]
    assert calls == expected.get("tool_calls", [])
    assert added.get("content", "") == (expected["content"] or "")
