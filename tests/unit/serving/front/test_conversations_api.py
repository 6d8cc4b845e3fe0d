"""OpenAI's Conversations API, called by its own client over real HTTP, on the real turns of one replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.front.api.fields import MAX_GRAMMAR_CHARS
from serving.front.api.responses import conversation_log
from serving.front.api.responses.item_pages import item_page
from serving.front.http import create_http_app
from tests.unit.serving.front.test_background_responses import SLOW_S, FrontEnd, front_ends
from tests.unit.serving.local_service import LocalService, http_server
from tests.unit.serving.responses_client import GREEDY, WEATHER, Served, expected, said, user
from tests.unit.serving.sdk_clients import openai_at


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[FrontEnd]:
    async with front_ends(tmp_path, 1) as cluster:
        yield cluster.members[0]


def with_id(text: str, item_id: str) -> Any:
    return user(text) | {"id": item_id}


async def texts(client: openai.AsyncOpenAI, conversation_id: str, **options: Any) -> list[str]:
    page = await client.conversations.items.list(conversation_id, **({"order": "asc"} | options))
    return [item.content[0].text async for item in page]  # type: ignore[union-attr]


async def test_metadata_of_null_leaves_a_conversation_none(served: Served) -> None:
    """OpenAI's client has null for none, here as where a conversation is created."""
    made = await served.client.conversations.create(metadata={"a": "b"})
    changed = await served.client.conversations.update(made.id, metadata=None)
    assert changed.metadata == {}
    assert await served.client.conversations.retrieve(made.id) == changed


async def test_a_call_that_is_tried_again_adds_nothing_to_its_conversation(served: Served) -> None:
    """The client counts its tries. After a lost answer the conversation had everything twice."""
    again = {"x-stainless-retry-count": "1"}
    conversation = await served.client.conversations.create(items=[user("zero")])
    named: Any = {"conversation": conversation.id, "extra_headers": again}
    first = await served.ask("one", **named)
    repeated = await served.ask("one", **named)
    assert (repeated.id, repeated.output_text) == (first.id, first.output_text)
    stream = await served.client.responses.create(input="one", stream=True, **named, **GREEDY)
    events = [event async for event in stream]
    assert events[0].type == "response.created", "a stream and a whole answer are asked for differently"
    said_so_far = await texts(served.client, conversation.id)
    assert said_so_far[:3] == ["zero", "one", first.output_text]
    assert len(said_so_far) == 5
    replayed = [
        event
        async for event in await served.client.responses.create(input="one", stream=True, **named, **GREEDY)
    ]
    assert replayed[-1].response.id == events[-1].response.id  # type: ignore[union-attr]
    other = await served.ask("two", **named)
    meant = await served.ask("two", conversation=conversation.id)
    assert len({first.id, other.id, meant.id}) == 3
    assert len(await texts(served.client, conversation.id)) == 9


async def test_a_call_that_is_tried_again_behind_a_deleted_response_is_made(served: Served) -> None:
    """The conversation keeps what the response said. It was looked up there, and the call was refused with 404."""
    conversation = await served.client.conversations.create()
    first = await served.ask("one", conversation=conversation.id)
    await served.client.responses.delete(first.id)
    again = {"x-stainless-retry-count": "1"}
    second = await served.ask("one", conversation=conversation.id, extra_headers=again)
    assert second.id != first.id
    assert len(await texts(served.client, conversation.id)) == 4


async def test_a_response_may_answer_what_is_there_already(served: Served) -> None:
    """An input was required. OpenAI's client does not require it."""
    conversation = await served.client.conversations.create(items=[user("zero")])
    response = await served.client.responses.create(conversation=conversation.id, **GREEDY)
    assert response.output_text == expected([user("zero")])
    items = [user("zero"), said(response)]
    on = await served.client.responses.create(input=[], previous_response_id=response.id, **GREEDY)
    assert on.output_text == expected(items)
    assert await texts(served.client, conversation.id) == ["zero", response.output_text]
    empty = await served.client.conversations.create()
    with pytest.raises(openai.BadRequestError, match="input: nothing has been said yet"):
        await served.client.responses.create(conversation=empty.id, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="input: give an input, or something to go on from"):
        await served.client.responses.create(**GREEDY)


async def test_responses_go_on_in_it(served: Served) -> None:
    conversation = await served.client.conversations.create(items=[user("zero")], metadata={"k": "v"})
    items = [user("zero")]
    cached = 0
    for number, text in enumerate(("one", "two", "three")):
        named: Any = conversation.id if number % 2 else {"id": conversation.id}
        items.append(user(text))
        response = await served.ask(text, conversation=named)
        assert response.output_text == expected(items)
        assert response.conversation.id == conversation.id
        assert response.usage.input_tokens_details.cached_tokens >= cached
        cached = response.usage.input_tokens
        items.append(said(response))
        again = await served.client.responses.retrieve(response.id)
        assert again == response
    assert await texts(served.client, conversation.id) == [item["content"][0]["text"] for item in items]
    names = {session.session_id.partition("-")[0] for session in served.service.cluster.sessions()}
    assert names == {"conv", "resp"}
    assert len(served.service.cluster.sessions()) == 2, "each response was a turn of one session"


@pytest.mark.parametrize("streams", [False, True])
async def test_it_survives_front_ends_and_moves(service: LocalService, streams: bool) -> None:
    items: list[dict[str, Any]] = []
    conversation_id = None
    for text in ("one", "two", "three"):
        async with http_server(create_http_app(service)) as url, openai_at(url) as client:
            conversation_id = conversation_id or (await client.conversations.create()).id
            items.append(user(text))
            answer: Any = await client.responses.create(
                input=text, conversation=conversation_id, stream=streams, **GREEDY
            )
            response = [event async for event in answer][-1].response if streams else answer
            assert response.output_text == expected(items)
            items.append(said(response))
        for session_id in service.rig.sessions.held():
            await service.rig.host.release(session_id)


async def test_it_is_had_again_changed_and_deleted(served: Served) -> None:
    made = await served.client.conversations.create(metadata={"a": "b"})
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    assert await served.client.conversations.retrieve(made.id) == made
    changed = await served.client.conversations.update(made.id, metadata={"c": "d"})
    assert changed == made.model_copy(update={"metadata": {"c": "d"}})
    assert await served.client.conversations.retrieve(made.id) == changed
    response = await served.ask("one", conversation=made.id)
    deleted = await served.client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    assert (await served.client.responses.retrieve(response.id)).id == response.id
    for gone in (made.id, "conv_nobody", "nobody"):
        for call in (
            served.client.conversations.retrieve(gone),
            served.client.conversations.delete(gone),
            served.client.conversations.update(gone, metadata={}),
            served.client.conversations.items.create(gone, items=[user("x")]),  # type: ignore[list-item]
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await call
            assert caught.value.param == "conversation_id"
        with pytest.raises(openai.NotFoundError) as caught:
            await served.ask("one", conversation=gone)
        assert caught.value.param == "conversation"


async def test_items_are_added_listed_and_taken_out(served: Served) -> None:
    made = await served.client.conversations.create(items=[user("one")])
    first = await served.ask("two", conversation=made.id)
    added = await served.client.conversations.items.create(made.id, items=[user("three"), user("four")])
    assert [item.content[0].text for item in added.data] == ["three", "four"]
    second = await served.ask("five", conversation=made.id)
    items = [user("one"), user("two"), said(first), user("three"), user("four"), user("five")]
    assert second.output_text == expected(items)
    assert second.usage.input_tokens_details.cached_tokens > 0, "what was added came into the same session"
    shown = [*(item["content"][0]["text"] for item in items), second.output_text]
    assert await texts(served.client, made.id) == shown
    assert await texts(served.client, made.id, order="desc", limit=2) == shown[::-1]
    three = added.data[0]
    one = await served.client.conversations.items.retrieve(three.id, conversation_id=made.id)
    assert one == three
    assert (await served.client.conversations.items.delete(three.id, conversation_id=made.id)).id == made.id
    with pytest.raises(openai.NotFoundError):
        await served.client.conversations.items.retrieve(three.id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        await served.client.conversations.items.delete(three.id, conversation_id=made.id)
    third = await served.ask("six", conversation=made.id)
    left = [*items[:3], *items[4:], said(second), user("six")]
    assert third.output_text == expected(left)
    fourth = await served.ask("seven", conversation=made.id)
    assert fourth.output_text == expected([*left, said(third), user("seven")])
    assert fourth.usage.input_tokens_details.cached_tokens > 0
    for response in (first, second, third):
        assert (await served.client.responses.retrieve(response.id)).output_text == response.output_text


async def test_each_response_has_instructions_of_its_own(served: Served) -> None:
    made = await served.client.conversations.create()
    items: list[dict[str, Any]] = []
    for text, instructions in (("one", "Be short."), ("two", "Be long."), ("three", None)):
        items.append(user(text))
        response = await served.ask(text, conversation=made.id, instructions=instructions)
        assert response.output_text == expected(items, instructions)
        items.append(said(response))


async def test_it_does_not_need_its_responses_sessions(served: Served) -> None:
    made = await served.client.conversations.create()
    first = await served.ask("one", conversation=made.id)
    await served.client.responses.delete(first.id)
    assert await texts(served.client, made.id) == ["one", first.output_text]
    second = await served.ask("two", conversation=made.id)
    assert second.output_text == expected([user("one"), said(first), user("two")])
    await served.client.conversations.update(made.id, metadata={"k": "v"})
    for session in served.service.cluster.sessions():
        if session.session_id.startswith("resp-"):
            assert await served.service.close_session(session.session_id, tenant="")
    assert await texts(served.client, made.id) == ["one", first.output_text, "two", second.output_text]


async def test_a_response_that_came_to_nothing_leaves_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await served.client.conversations.create()
    with pytest.raises(openai.BadRequestError):
        await served.ask("word " * 2000, conversation=made.id)
    assert await texts(served.client, made.id) == []
    monkeypatch.setattr(conversation_log, "GIVEN_UP_AFTER_S", 0.0)
    response = await served.ask("one", conversation=made.id)
    assert response.output_text == expected([user("one")])
    read = await conversation_log.read_conversation(served.service, made.id, "")
    assert [entry.response_id for entry in read.entries] == [response.id]


async def test_a_conversation_that_is_full_takes_nothing_more(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call reads the whole conversation, and one without an end took as much of the log and of front ends. What is
    there can still be read, changed and taken out."""
    client = served.client.conversations
    made = await client.create(items=[with_id("a" * 1000, "x")])
    await client.items.create(made.id, items=[with_id("b" * 1000, "y")])
    monkeypatch.setattr(conversation_log, "MOST_NOTES_BYTES", 3000)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.items.create(made.id, items=[user("c" * 1000)])
    assert caught.value.param == "conversation_id"
    monkeypatch.setattr(conversation_log, "MOST_NOTES_BYTES", 2000)
    with pytest.raises(openai.BadRequestError) as caught:
        await served.ask("one", conversation=made.id)
    assert caught.value.param == "conversation"
    await client.update(made.id, metadata={"a": "b"})
    await client.items.delete("x", conversation_id=made.id)
    assert await texts(served.client, made.id) == ["b" * 1000]


async def test_an_id_names_one_item(served: Served) -> None:
    """As at OpenAI. The list of a conversation in which an id was repeated had no last page."""
    client = served.client.conversations
    with pytest.raises(openai.BadRequestError) as caught:
        await client.create(items=[with_id("a", "x"), user("b"), with_id("c", "x")])
    assert caught.value.param == "items[2].id"
    made = await client.create(items=[with_id("a", "x"), with_id("b", "y")])
    first = await served.ask("one", conversation=made.id)
    answer = first.output[0].model_dump(exclude_none=True)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.items.create(made.id, items=[user("c"), with_id("a", "x")])
    assert caught.value.param == "items[1].id"
    turns = {session.session_id: session.turns for session in served.service.cluster.sessions()}
    for given in (with_id("a", "x"), answer):
        with pytest.raises(openai.BadRequestError) as caught:
            await served.client.responses.create(input=[given], conversation=made.id, **GREEDY)
        assert caught.value.param == "input[0].id"
    assert {session.session_id: session.turns for session in served.service.cluster.sessions()} == turns
    await client.items.delete("x", conversation_id=made.id)
    await client.items.create(made.id, items=[with_id("again", "x")])
    assert await texts(served.client, made.id, limit=1) == ["b", "one", first.output_text, "again"]


async def test_a_conversation_may_begin_with_what_was_answered_elsewhere(served: Served) -> None:
    first = await served.ask("one")
    answer: Any = first.output[0].model_dump(exclude_none=True)
    made = await served.client.conversations.create(items=[user("one"), answer])
    second = await served.ask("two", conversation=made.id)
    assert second.output_text == expected([user("one"), said(first), user("two")])
    item = await served.client.conversations.items.retrieve(answer["id"], conversation_id=made.id)
    assert item.model_dump()["content"][0]["text"] == first.output_text


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_end_though_an_id_is_repeated(order: Any) -> None:
    items = [{"id": name} for name in ("x", "x", "y", "x", "z")]
    after, seen = None, []
    for _ in items:
        page = item_page(items, 1, order, after)
        after = page["last_id"]
        seen.append(after)
        if not page["has_more"]:
            break
    assert not page["has_more"], seen


BEGUN: list[dict[str, Any]] = [
    {"input": []},
    {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_time"}},
    {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"enum": ["x" * MAX_GRAMMAR_CHARS]}}}},
    {"include": ["message.output_text.logprobs"], "background": True},
]


@pytest.mark.parametrize("fields", BEGUN)
async def test_a_refused_response_is_not_written_into_it(served: Served, fields: dict[str, Any]) -> None:
    """Each refusal had added a turn to the conversation's session, with a response that never came."""
    made = await served.client.conversations.create()
    body = {"input": "hi", "conversation": made.id, **fields}
    for _ in range(3):
        with pytest.raises(openai.BadRequestError):
            await served.client.post("/responses", body=body, cast_to=object)
    assert [session.turns for session in served.service.cluster.sessions()] == [1]


async def test_changes_that_come_at_once_all_count(served: Served) -> None:
    made = await served.client.conversations.create()
    add = served.client.conversations.items.create
    await asyncio.gather(*(add(made.id, items=[user(str(number))]) for number in range(6)))
    assert sorted(await texts(served.client, made.id)) == [str(number) for number in range(6)]


async def test_one_in_the_background_comes_into_it(alone: FrontEnd) -> None:
    made = await alone.client.conversations.create()
    begun = await alone.begin("one", conversation=made.id)
    first = await alone.ended(begun.id)
    assert await texts(alone.client, made.id) == ["one", first.output_text]
    alone.cluster.service.rig.runner.step_s = SLOW_S
    begun = await alone.begin("two", conversation=made.id)
    await alone.client.responses.cancel(begun.id)
    alone.cluster.service.rig.runner.step_s = 0.0
    third = await alone.ended((await alone.begin("three", conversation=made.id)).id)
    assert third.output_text == expected([user("one"), said(first), user("three")])


async def test_tenants_do_not_see_each_others(alone: FrontEnd) -> None:
    made = await alone.client.conversations.create(items=[user("one")])
    theirs = alone.others.conversations
    for call in (
        theirs.retrieve(made.id),
        theirs.delete(made.id),
        theirs.update(made.id, metadata={}),
        theirs.items.create(made.id, items=[user("x")]),  # type: ignore[list-item]
        alone.others.responses.create(input="two", conversation=made.id, **GREEDY),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    assert await texts(alone.client, made.id) == ["one"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_x"}, "conversation"),
    ({"store": False}, "conversation"),
    ({"conversation": 3}, "conversation"),
    ({"conversation": {"name": "x"}}, "conversation.id"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    made = await served.client.conversations.create()
    body = {"input": "hi", "conversation": made.id, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        await served.client.post("/responses", body=body, cast_to=object)
    assert caught.value.param == param


async def test_a_session_of_that_name_is_no_conversation(served: Served) -> None:
    await served.client.chat.completions.create(
        model=GREEDY["model"],
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=2,
        extra_headers={"x-session-id": "conv-mine"},
    )
    with pytest.raises(openai.NotFoundError):
        await served.client.conversations.retrieve("conv_mine")


def test_a_long_conversation_is_read_in_a_moment() -> None:
    """Each of its notes was compared with all entries before it: four thousand responses took half a second, at each
    call and on the event loop."""
    item = {"id": "msg_1"}
    began = {"created_at": 1, "metadata": {}, "items": [item]}
    responses = [
        {"response": f"resp_{number}", "begun_s": 1.0, "learned": {f"resp_{number - 1}": [item]}}
        for number in range(16_000)
    ]
    conversation = conversation_log.Conversation("conv_1")
    started_s = time.process_time()
    conversation.take([began, *responses])
    assert time.process_time() - started_s < 1.0
    assert (len(conversation.items), conversation.last_response_id) == (16_000, "resp_15998")
