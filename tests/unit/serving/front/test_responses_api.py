"""The Responses API, called by OpenAI's own client over real HTTP, on the real turns of one replica."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import openai
import pytest
from msgspec.structs import replace

from serving.wire.turns import SamplingDefaults, SessionInfo, TurnFinish
from tests.unit.serving.local_service import (
    MODEL,
)
from tests.unit.serving.responses_client import GREEDY, MOST, WEATHER, Served, expected, said, user
from tests.unit.serving.sdk_clients import openai_of
from tests.unit.serving.telling_service import TellingService

PATCH = {"type": "custom", "name": "apply_patch", "description": "Applies a patch."}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'


async def test_whole_and_streamed_answers_agree(served: Served) -> None:
    whole = await served.ask("My dog is called Rex.", instructions="Be short.", store=False)
    assert whole.output_text == expected([user("My dog is called Rex.")], "Be short.")
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == MOST
    stream = await served.ask("My dog is called Rex.", instructions="Be short.", store=False, stream=True)
    events = [event async for event in stream]
    final = events[-1].response
    names, numbers = [event.type for event in events], [event.sequence_number for event in events]
    assert final.output_text == whole.output_text
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert numbers == list(range(len(numbers)))
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


@pytest.mark.parametrize("moves", [False, True])
async def test_a_response_goes_on_from_the_one_before(served: Served, moves: bool) -> None:
    items: list[dict[str, Any]] = []
    before, cached = None, 0
    for text in ("one", "two", "three"):
        items.append(user(text))
        response = await served.ask(text, previous_response_id=None if before is None else before.id)
        assert response.output_text == expected(items)
        assert response.usage.input_tokens_details.cached_tokens >= cached
        cached = 0 if moves else response.usage.input_tokens
        items.append(said(response))
        if moves:
            for session_id in served.service.rig.sessions.held():
                await served.service.rig.host.release(session_id)
        before = response
    assert len(served.service.cluster.sessions()) == 1, "each was a turn of one session"


async def test_two_go_on_from_the_same_one(served: Served) -> None:
    first = await served.ask("one")
    begun = [user("one"), said(first)]
    left = await served.ask("left", previous_response_id=first.id)
    right = await served.ask("right", previous_response_id=first.id)
    for text, response in (("left", left), ("right", right)):
        assert response.output_text == expected([*begun, user(text)])
        assert response.usage.input_tokens_details.cached_tokens > 0
        on = await served.ask("on", previous_response_id=response.id)
        assert on.output_text == expected([*begun, user(text), said(response), user("on")])
    at_once = await asyncio.gather(
        *(served.ask(str(number), previous_response_id=first.id) for number in range(4))
    )
    for number, response in enumerate(at_once):
        assert response.output_text == expected([*begun, user(str(number))])


async def test_the_owner_knows_whether_a_session_has_a_turn(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger may say for a second that a turn is in flight that has been committed or aborted. What followed such a
    response used to be computed again, in a session of its own."""
    session = served.service.session

    async def told_before(session_id: str, *, tenant: str) -> SessionInfo | None:
        found = await session(session_id, tenant=tenant)
        return None if found is None else replace(found, in_turn=True)

    monkeypatch.setattr(served.service, "session", told_before)
    first = await served.ask("one")
    second = await served.ask("two", previous_response_id=first.id)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert len(served.service.cluster.sessions()) == 1


async def test_a_turn_that_has_come_between_is_not_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was committed after the history was read, and before the number of the next turn was."""
    first = await served.ask("one")
    session, came_between = served.service.session, list[Any]()

    async def later(session_id: str, *, tenant: str) -> SessionInfo | None:
        if not came_between:
            came_between.append(None)
            came_between.append(await served.ask("left", previous_response_id=first.id))
        return await session(session_id, tenant=tenant)

    monkeypatch.setattr(served.service, "session", later)
    right = await served.ask("right", previous_response_id=first.id)
    assert right.output_text == expected([user("one"), said(first), user("right")])
    left = await served.client.responses.retrieve(came_between[1].id)
    assert left.output_text == expected([user("one"), said(first), user("left")])


async def test_what_is_not_stored_is_not_kept_otherwise(served: Served) -> None:
    """The setting sessions.unnamed.durable keeps what may be kept."""
    await served.ask("one", store=False)
    await served.ask("one")
    await served.ask("one", extra_headers={"x-session-id": "s"})
    assert [call.may_be_kept for call in served.service.calls] == [False, True, True]


async def test_other_instructions_or_tools_are_taken_with_all_that_was_said(served: Served) -> None:
    first = await served.ask("one", instructions="Be short.")
    second = await served.ask("two", previous_response_id=first.id, instructions="Be long.")
    begun = [user("one"), said(first), user("two")]
    assert second.output_text == expected(begun, "Be long.")
    third = await served.ask("three", previous_response_id=second.id)
    assert third.output_text == expected([*begun, said(second), user("three")])
    unstored = await served.ask("four", previous_response_id=third.id, store=False)
    begun = [*begun, said(second), user("three"), said(third), user("four")]
    assert unstored.output_text == expected(begun)


async def test_a_response_is_had_again_as_it_was_told(served: Served) -> None:
    """With the time at which its turn ended. It had the time at which it was read."""
    served.service.rig.unix_clock = lambda: 1_700_000_000.75
    first = await served.ask("one", instructions="Be short.", metadata={"k": "v"})
    second = await served.ask("two", previous_response_id=first.id, instructions="Be short.")
    fork = await served.ask("three", previous_response_id=first.id, instructions="Be short.")
    for session_id in served.service.rig.sessions.held():
        await served.service.rig.host.release(session_id)
    for response in (first, second, fork):
        assert response.completed_at == 1_700_000_000
        assert await served.client.responses.retrieve(response.id) == response
        told = await served.client.responses.retrieve(response.id, stream=True)
        assert [event async for event in told][-1].response == response
    items = await served.client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items.data] == ["two"]
    assert items.has_more is False


async def test_an_earlier_version_kept_no_time_of_the_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await served.ask("one")
    transcript = served.service.transcript

    async def as_before(session_id: str, *, tenant: str) -> Any:
        turns = await transcript(session_id, tenant=tenant)
        return [replace(turn, said=replace(turn.said, ended_s=None)) for turn in turns]

    monkeypatch.setattr(served.service, "transcript", as_before)
    again = await served.client.responses.retrieve(first.id)
    assert again == first.model_copy(update={"completed_at": None})


async def test_a_deleted_response_is_gone(served: Served) -> None:
    first = await served.ask("one")
    second = await served.ask("two", previous_response_id=first.id)
    await served.client.responses.delete(first.id)
    for gone in (first.id, "resp_nobody", f"resp_{'0' * 48}"):
        with pytest.raises(openai.NotFoundError):
            await served.client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError):
            await served.ask("three", previous_response_id=gone)
        with pytest.raises(openai.NotFoundError):
            await served.client.responses.delete(gone)
    assert (await served.client.responses.retrieve(second.id)).id == second.id
    await served.client.responses.delete(second.id)
    assert served.service.cluster.sessions() == []


async def test_a_response_says_how_it_was_sampled(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The response used to say 1.0 even if the model's own defaults were different."""
    defaults = SamplingDefaults(temperature=0.25, top_p=0.5)
    monkeypatch.setattr(served.service, "model", replace(MODEL, sampling=defaults))
    ask = partial(served.client.responses.create, input="one", max_output_tokens=2)
    for response in (made := await ask(), await served.client.responses.retrieve(made.id)):
        assert (response.temperature, response.top_p) == (0.25, 0.5)
    own = await ask(temperature=0, top_p=1)
    assert (own.temperature, own.top_p) == (0, 1)


async def test_load_clients_ask_for_answers_of_full_length(served: Served) -> None:
    """guidellm and vLLM's benchmark do so in Responses, as in chats."""
    await served.ask("My dog is called Rex.", extra_body={"ignore_eos": True})
    assert served.service.calls[-1].sampling.ignore_eos


async def test_what_is_not_stored_is_not_had_again(served: Served) -> None:
    response = await served.ask("one", store=False)
    assert served.service.cluster.sessions() == []
    with pytest.raises(openai.NotFoundError):
        await served.client.responses.retrieve(response.id)


async def test_whole_inputs_are_recognized(served: Served) -> None:
    items: list[dict[str, Any]] = []
    cached = 0
    for turn in range(5):
        items.append(user(f"question {turn}"))
        response = await served.client.responses.create(input=list(items), store=False, **GREEDY)
        assert response.output_text == expected(items)
        if turn > 1:
            assert response.usage.input_tokens_details.cached_tokens >= cached
        cached = response.usage.input_tokens
        items += [item.model_dump(exclude_none=True) for item in response.output]


@pytest.mark.parametrize("mode", ["required", "auto"])
async def test_where_an_allowed_tool_must_be_called_the_model_is_told_of_all(
    served: Served, mode: str
) -> None:
    """As in chats. It was told of the allowed tools alone, so a stored response began a history of its own."""
    clock = {"type": "custom", "name": "clock"}
    allowed = {"type": "allowed_tools", "mode": mode, "tools": [clock]}
    more: Any = {"input": "on", "tools": [WEATHER, clock], "tool_choice": allowed}
    first = await served.ask("one", tools=[WEATHER, clock])
    on = await served.client.responses.create(
        previous_response_id=first.id, **more, **GREEDY | {"max_output_tokens": 60}
    )
    prompt: Any = served.service.calls[-1].prompt
    names = [tool["function"]["name"] for tool in prompt.tools]
    if mode == "auto":
        assert names == ["clock"]
        return
    assert names == ["get_weather", "clock"]
    assert {item.name for item in on.output} == {"clock"}
    assert on.usage.input_tokens_details.cached_tokens > 0
    assert len(served.service.cluster.sessions()) == 1


async def test_a_call_that_must_be_made_is_answered_and_gone_on_from(served: Served) -> None:
    more = GREEDY | {"max_output_tokens": 300}
    response = await served.client.responses.create(
        input="Weather in Bern?",
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        **more,
    )
    (call,) = response.output
    assert (call.type, call.name, response.status) == ("function_call", "get_weather", "completed")
    assert set(json.loads(call.arguments)) <= {"city"}
    again = await served.client.responses.retrieve(response.id)
    assert again.output[0].call_id == call.call_id
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    answer["caller"] = {"type": "direct"}
    on = await served.client.responses.create(
        input=[answer], previous_response_id=response.id, tools=[WEATHER], **GREEDY
    )
    assert on.usage.input_tokens_details.cached_tokens > 0


async def test_an_answer_is_held_to_a_schema(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"dog": {"type": "string", "maxLength": 5}},
        "required": ["dog"],
        "additionalProperties": False,
    }
    response = await served.client.responses.create(
        input="Dog?",
        text={"format": {"type": "json_schema", "name": "dog", "schema": schema}},
        **(GREEDY | {"max_output_tokens": 200}),
    )
    assert list(json.loads(response.output_text)) == ["dog"]
    assert response.status == "completed"


async def told(service: TellingService, **fields: Any) -> tuple[Any, list[Any]]:
    """The response with these words, whole and as events. Checks that both have the same output."""
    asked = {"model": MODEL.model_id, "input": "Weather?", "store": False, **fields}
    async with openai_of(service) as client:
        whole = await client.responses.create(**asked)
        stream = await client.responses.create(**asked, stream=True)
        events = [event async for event in stream]
    final = events[-1].response
    shown = [[item.model_dump(exclude={"id", "call_id"}) for item in each.output] for each in (whole, final)]
    assert shown[0] == shown[1]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    return whole, events


async def test_text_and_calls_are_items_in_their_order() -> None:
    whole, events = await told(TellingService("Let me see. ", *CALL, *CALL), tools=[WEATHER])
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output_text.strip() == "Let me see."
    assert len({item.call_id for item in whole.output[1:]}) == 2
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == "".join(done)
    assert [json.loads(arguments) for arguments in done] == [{"city": "Bern"}] * 2


async def test_a_custom_tool_gets_plain_text() -> None:
    text = 'a "quoted"\nline \\u00e9'
    call = json.dumps({"name": "apply_patch", "arguments": {"input": text}})
    whole, events = await told(TellingService(*f"<tool_call>\n{call}\n</tool_call>"), tools=[PATCH, WEATHER])
    (item,) = whole.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", text)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == text


async def test_a_turn_that_is_aborted_is_cancelled() -> None:
    whole, events = await told(TellingService("He", finish=TurnFinish("abort")))
    assert (whole.status, events[-1].type) == ("cancelled", "response.incomplete")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call", "id": "w"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "w"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
        "input[0].content[0].type",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"background": True, "store": False}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"mood": 1}, "mood"),
    ({"previous_response_id": "x"}, "previous_response_id"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
async def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL.model_id, "input": "hi", **fields}
    with pytest.raises(openai.APIStatusError) as caught:
        await served.client.post("/responses", body=body, cast_to=object)
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == param


async def test_embeddings_are_not_served(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="not served"):
        await served.client.embeddings.create(model="m", input="x")


async def test_too_long_an_input_is_named(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await served.ask("word " * 2000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
