"""Custom tools in chats: the model gets a function with one text argument, and clients get the text."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming._deltas import accumulate_delta

from serving.front.api.openai.chat_answers import CustomCalls
from serving.front.api.reply_json import reply_json
from serving.front.http import create_http_app
from serving.text.answer_pieces import CallPiece
from serving.wire.turn_events import merge_events
from serving.wire.turns import TurnCall, TurnEvent, TurnFinish
from tests.unit.serving.local_service import LocalService, client_of
from tests.unit.serving.telling_service import STOP, TellingService
from tests.unit.serving.tool_texts import cut

CHAT = "/v1/chat/completions"
ASKED = {"role": "user", "content": "Write it down."}
NOTE = {"type": "custom", "custom": {"name": "note", "description": "Keeps a text."}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TEXT = 'say "hi"\n\\ ä 😀'
CALL = f'<tool_call>\n{{"name": "note", "arguments": {{"input": {json.dumps(TEXT)}}}}}\n</tool_call>'

ALLOWED = {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "other"}}]}


async def asked(service: TellingService, **body: Any) -> Any:
    async with client_of(create_http_app(service)) as client:
        return await client.post(CHAT, json={"messages": [ASKED], "tools": [CLOCK, NOTE], **body})


async def streamed(pieces: Sequence[str], finish: TurnFinish = STOP) -> dict[str, Any]:
    """The streamed message, joined as the official client joins it."""
    reply = await asked(TellingService(*pieces, finish=finish), stream=True)
    whole: dict[object, object] = {}
    for line in reply.text.split("\n\n"):
        if line.startswith("data: {"):
            whole = accumulate_delta(whole, json.loads(line.removeprefix("data: "))["choices"][0]["delta"])
    return dict(whole)  # type: ignore[arg-type]


async def test_a_call_of_a_custom_tool_has_its_text() -> None:
    choice = (await asked(TellingService(CALL))).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (told,) = choice["message"]["tool_calls"]
    assert told.pop("id").isalnum()
    assert told == {"type": "custom", "custom": {"name": "note", "input": TEXT}}


async def test_a_stream_tells_the_text_piece_by_piece() -> None:
    reply = await asked(TellingService(*CALL), stream=True)
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["type"] == "custom"
    assert calls[0]["custom"] == {"name": "note", "input": ""}
    assert [call["custom"]["input"] for call in calls[1:]] == list(TEXT)
    assert all(set(call) == {"index", "custom"} for call in calls[1:])


async def test_functions_beside_it_are_told_as_functions() -> None:
    other = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    message = await streamed([CALL, other])
    assert [(call["type"], call["index"]) for call in message["tool_calls"]] == [
        ("custom", 0),
        ("function", 1),
    ]
    assert message["tool_calls"][0]["custom"]["input"] == TEXT
    assert message["tool_calls"][1]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("arguments", ['{"input": "cut o', '{"text": "other"}', '"no object"', "{}"])
async def test_arguments_that_are_not_as_asked_are_told_whole_and_streamed_alike(arguments: str) -> None:
    call = f'<tool_call>\n{{"name": "note", "arguments": {arguments}'
    cut_off = TurnFinish("length")
    choice = (await asked(TellingService(call, finish=cut_off))).json()["choices"][0]
    message = await streamed(list(call), cut_off)
    if "tool_calls" not in choice["message"]:
        assert message["content"] == choice["message"]["content"]
        return
    (whole,), (put_together,) = choice["message"]["tool_calls"], message["tool_calls"]
    assert put_together["custom"] == whole["custom"]


class ToldAtOnce(TellingService):
    """Tells a whole answer in its last event, as the log does."""

    async def _events(self, call: TurnCall) -> AsyncIterator[TurnEvent]:
        events = [event async for event in super()._events(call)]
        yield merge_events(events)


@pytest.mark.parametrize("arguments", ['{"x": 1, "input": "abc"}', '{"input": "abc\\u00'])
async def test_a_chunk_has_one_delta_for_a_call(arguments: str) -> None:
    """Some clients merge the deltas of a chunk by their position. The rest of a text was a second delta beside the
    first."""
    call = f'<tool_call>\n{{"name": "note", "arguments": {arguments}'
    service = ToldAtOnce(call, finish=TurnFinish("length"))
    reply = await asked(service, stream=True)
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    (told,) = [calls for event in events if (calls := event["choices"][0]["delta"].get("tool_calls"))]
    assert [delta["index"] for delta in told] == [0]
    (whole,) = (await asked(service)).json()["choices"][0]["message"]["tool_calls"]
    assert told[0]["custom"] == whole["custom"]


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(0, 200)))
def test_however_its_arguments_are_cut_the_text_is_the_same(text: str, places: list[int]) -> None:
    calls = CustomCalls(frozenset({"note"}))
    pieces = cut(json.dumps({"input": text}), places)
    called = [CallPiece(0, "note", pieces[0], "c"), *(CallPiece(0, None, piece) for piece in pieces[1:])]
    told = [call for each in called for call in calls.told([each], ended=False)] + calls.told([], ended=True)
    shown = json.loads(reply_json(text))
    assert "".join(json.loads(reply_json(call))["custom"]["input"] for call in told) == shown


async def test_the_model_has_it_as_a_function_and_reads_its_calls_again(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tool = {"type": "custom", "custom": {**NOTE["custom"], "format": grammar}}  # type: ignore[dict-item]
    called = {"id": "c1", "type": "custom", "custom": {"name": "note", "input": TEXT}}
    messages = [
        ASKED,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "kept"},
    ]
    body = {"messages": messages, "tools": [tool], "max_tokens": 1}
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    prompt = service.calls[-1].prompt
    (shown,) = prompt.tools  # type: ignore[union-attr]
    assert shown["function"]["parameters"]["required"] == ["input"]
    assert shown["function"]["description"].startswith("Keeps a text.")
    assert "[a-z]+" in shown["function"]["description"]
    (told,) = prompt.messages[1]["tool_calls"]  # type: ignore[union-attr]
    assert told == {
        "id": "c1",
        "type": "function",
        "function": {"name": "note", "arguments": {"input": TEXT}},
    }


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "note"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "note"}}],
            },
        },
    ],
)
async def test_an_answer_may_be_held_to_one(
    client: httpx.AsyncClient, service: LocalService, choice: dict[str, Any]
) -> None:
    body = {"messages": [ASKED], "tools": [CLOCK, NOTE], "tool_choice": choice, "max_tokens": 1}
    reply = await client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    held = service.calls[-1].constraint
    assert held is not None
    wanted = json.loads(held.source)
    assert [function["name"] for function in wanted["functions"]] == ["note"]
    assert wanted["functions"][0]["parameters"]["required"] == ["input"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [NOTE, NOTE]}, "tools[1].custom.name"),
        ({"tools": [NOTE, {"type": "function", "function": {"name": "note"}}]}, "tools[1].function.name"),
        (
            {
                "tools": [
                    {"type": "custom", "custom": {"name": "n", "format": {"type": "grammar", "grammar": {}}}}
                ]
            },
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"tools": [NOTE], "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
            "tool_choice.allowed_tools.tools[0].custom.name",
        ),
        (
            {"tools": [NOTE], "tool_choice": {"type": "function", "function": {"name": "note"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "custom", "custom": {"name": "clock"}}},
            "tool_choice.custom.name",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom"}]}]},
            "messages[0].tool_calls[0].custom",
        ),
    ],
)
async def test_what_is_wrong_with_one_is_named(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    reply = await client.post(CHAT, json={"messages": [ASKED], **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
