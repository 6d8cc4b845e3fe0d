"""Responses in a session that the client names, called by OpenAI's own client on the real turns of one replica."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from serving.front.http import create_http_app
from tests.unit.serving.front.test_sockets import refused
from tests.unit.serving.local_service import (
    MODEL,
    LocalService,
    client_of,
)
from tests.unit.serving.responses_client import GREEDY, MOST, Served, expected, user
from tests.unit.serving.telling_service import TellingService

SESSION = "anna-1"
NAMED = {"x-session-id": SESSION}
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def assistant(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def names(service: LocalService) -> list[str]:
    return [entry.session_id for entry in service.cluster.sessions()]


async def answered(served: Served, text: Any, **fields: Any) -> tuple[Any, dict[str, str]]:
    """A response in the session, and the headers of its reply."""
    headers = NAMED | fields.pop("headers", {})
    raw = await served.client.responses.with_raw_response.create(
        input=text, extra_headers=headers, **GREEDY, **fields
    )
    return raw.parse(), dict(raw.headers)


async def wrong(served: Served, headers: dict[str, str], **fields: Any) -> tuple[int, str | None, str]:
    """The status, the field and the message of a refused response."""
    with pytest.raises(openai.APIStatusError) as caught:
        await served.ask("one", extra_headers=headers, **fields)
    return caught.value.status_code, caught.value.param, caught.value.message


async def chatted(served: Served, text: str, session: str = SESSION, **first: Any) -> str:
    """A chat's turn in the session. `first`: a system message before the text."""
    system = [{"role": "system", "content": content} for content in first.values()]
    chat = await served.client.chat.completions.create(
        model=MODEL.model_id,
        messages=[*system, {"role": "user", "content": text}],
        temperature=0,
        max_tokens=MOST,
        extra_headers={"x-session-id": session},
    )
    return chat.choices[0].message.content or ""


async def messaged(served: Served, text: str) -> str:
    """A turn of the session that Anthropic's Messages make."""
    asked = {"model": MODEL.model_id, "max_tokens": MOST, "temperature": 0}
    reply = await served.client.post(
        "/messages",
        cast_to=dict[str, Any],
        body={**asked, "messages": [{"role": "user", "content": text}]},
        options={"headers": NAMED},
    )
    told: str = reply["content"][0]["text"]
    return told


async def test_all_protocols_go_on_in_one_session(served: Served) -> None:
    """The answers are those of a session that has only chats."""
    first = await chatted(served, "one", system="Be short.")
    second, headers = await answered(served, "two", instructions="Be short.")
    assert headers["x-session-turn"] == "1"
    assert second.usage.input_tokens_details.cached_tokens > 0
    third = await messaged(served, "three")
    fourth, headers = await answered(served, "four")
    assert headers["x-session-turn"] == "3"
    assert names(served.service) == [SESSION]
    twin = [await chatted(served, "one", "twin", system="Be short.")]
    twin += [await chatted(served, text, "twin") for text in ("two", "three", "four")]
    assert [first, second.output_text, third, fourth.output_text] == twin


@pytest.mark.parametrize(
    ("rules", "first", "in_responses", "in_messages"),
    [
        ("Be short.", "1", "input[1]", "messages[0]"),
        ("Be long and kind.", "one", "instructions", "system"),
    ],
)
async def test_another_history_is_named_in_the_requests_own_parts(
    served: Served, rules: str, first: str, in_responses: str, in_messages: str
) -> None:
    """The place used to be counted in the template's messages, of which the first are the instructions."""
    answer = await chatted(served, "one", system="Be short.")
    said = [first, answer, "two"]
    turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    headers = NAMED | {"x-session-mode": "full"}
    for path, body, named in (
        (
            "/v1/responses",
            {"instructions": rules, "input": [thought, *turns], "max_output_tokens": MOST},
            in_responses,
        ),
        ("/v1/messages", {"system": rules, "messages": turns, "max_tokens": MOST}, in_messages),
    ):
        async with client_of(create_http_app(served.service)) as client:
            reply = await client.post(path, json=body, headers=headers)
        assert reply.status_code == 409
        assert reply.json()["error"]["message"].startswith(f"{named}: the history of session '{SESSION}'")


async def test_an_ambiguous_input_is_named_as_its_field_is(served: Served) -> None:
    """The message said `messages`, a field that a response does not have."""
    await answered(served, "one")
    status, param, message = await wrong(served, NAMED)
    assert (status, param) == (409, "input")
    assert f"- input: session '{SESSION}' began with just these." in message


async def test_the_session_alone_keeps_the_response(served: Served) -> None:
    response, _ = await answered(served, "one")
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        await served.ask("two", previous_response_id=response.id)
    again, headers = await answered(served, "two", store=False)
    assert (again.store, headers["x-session-turn"]) == (False, "1")
    assert names(served.service) == [SESSION]


@pytest.mark.parametrize("mode", [{}, {"x-session-mode": "full"}])
async def test_a_whole_history_goes_on_in_the_session(served: Served, mode: dict[str, str]) -> None:
    """The client sends our items back with the ids that they have."""
    items: list[Any] = []
    cached = 0
    for number, text in enumerate(("one", "two", "three")):
        items.append(user(text))
        response, headers = await answered(served, items, headers=mode)
        assert response.output_text == expected(items)
        assert headers["x-session-turn"] == str(number)
        assert response.usage.input_tokens_details.cached_tokens >= cached
        cached = response.usage.input_tokens
        items += [item.to_dict() for item in response.output]
    items[0] = user("uno")
    with pytest.raises(openai.ConflictError, match="has another message there"):
        await answered(served, [*items, user("four")], headers=mode)
    assert names(served.service) == [SESSION]


async def test_new_input_may_look_like_a_whole_history(served: Served) -> None:
    await answered(served, "one")
    items = [user("two"), assistant("Two what?"), user("three")]
    response, headers = await answered(served, items, headers={"x-session-mode": "append"})
    assert headers["x-session-turn"] == "1"
    assert response.usage.input_tokens_details.cached_tokens > 0


async def test_a_stream_is_a_turn_too(served: Served) -> None:
    first = await chatted(served, "one")
    raw = await served.client.responses.with_raw_response.create(
        input="two", stream=True, extra_headers=NAMED, **GREEDY
    )
    assert raw.headers["x-session-turn"] == "1"
    events = [event async for event in raw.parse()]
    final: Any = events[-1]
    assert final.type == "response.incomplete"
    twin = [await chatted(served, text, "twin") for text in ("one", "two")]
    assert [first, final.response.output_text] == twin
    assert final.response.store is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
    ],
)
async def test_what_names_another_conversation_is_refused(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    status, named, message = await wrong(served, NAMED, **fields)
    assert (status, named) == (400, param)
    assert "x-session-id" in message
    assert f"without {param}" in message
    assert names(served.service) == []


async def test_a_turn_must_have_the_number_that_it_names(served: Served) -> None:
    first = NAMED | {"x-session-turn": "0"}
    await served.ask("one", extra_headers=first)
    status, param, _ = await wrong(served, first)
    assert (status, param) == (409, "x-session-turn")
    status, param, _ = await wrong(served, {"x-session-turn": "0"})
    assert (status, param) == (400, "x-session-turn")


async def test_a_turn_with_a_key_runs_once(served: Served) -> None:
    key = {"idempotency-key": "k-1"}
    first, headers = await answered(served, "one", headers=key)
    assert "idempotent-replayed" not in headers
    again, headers = await answered(served, "one", headers=key)
    assert (headers["idempotent-replayed"], headers["x-session-turn"]) == ("true", "0")
    assert again.output_text == first.output_text
    status, param, _ = await wrong(served, NAMED | key, instructions="Be short.")
    assert (status, param) == (409, "idempotency-key")
    _, headers = await answered(served, "two")
    assert headers["x-session-turn"] == "1"


async def test_calls_have_the_ids_that_chat_gives_them() -> None:
    """An id is that of the turn, whichever protocol reads it: a repeated turn has the same calls."""
    service = TellingService(CALL)
    async with client_of(create_http_app(service)) as client:
        asked = {"input": "Weather?", "tools": [TOOL]}
        reply = await client.post("/v1/responses", json=asked, headers=NAMED)
        (call,) = reply.json()["output"]
        function = {"name": "get_weather", "parameters": {"type": "object"}}
        chat = {
            "messages": [{"role": "user", "content": "Weather?"}],
            "tools": [{"type": "function", "function": function}],
        }
        told = await client.post("/v1/chat/completions", json=chat, headers=NAMED)
        (other,) = told.json()["choices"][0]["message"]["tool_calls"]
    assert call["call_id"] == other["id"]


@pytest.mark.parametrize("header", ["x-session-id", "x-session-mode", "x-session-turn"])
async def test_a_handshake_names_no_session(url: str, header: str) -> None:
    assert await refused(url, {header: "0"}) == (400, "invalid_request", header)
