"""Clients that send the whole conversation each time: their turns do what they mean, and cost only what is new."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.replica import turn_request
from serving.text.chat_template import ChatTemplate
from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.local_service import LocalService, local_client, small_text
from tests.unit.serving.replica_rig import VOCAB_SIZE

CHAT = "/v1/chat/completions"
MOST = 5
RULES = {"role": "system", "content": "Be short."}
OTHER_RULES = {"role": "system", "content": "Be long and kind."}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(reply: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


def tokens_of(messages: list[dict[str, Any]]) -> list[int]:
    return small_text().encode_prompt(ChatPrompt(tuple(messages)))


async def ask(
    client: httpx.AsyncClient, messages: list[dict[str, Any]], session: str | None = None, **headers: str
) -> dict[str, Any]:
    """Sends the messages. Checks that the reply equals that of a server that knows no session."""
    reply = await sent(client, messages, session, **headers)
    assert reply.status_code == 200, reply.text
    prompt = tokens_of(messages)
    said: dict[str, Any] = reply.json()
    assert said["choices"][0]["token_ids"] == null_generate(prompt, MOST, VOCAB_SIZE)
    assert said["usage"]["prompt_tokens"] == len(prompt)
    return said


async def sent(
    client: httpx.AsyncClient,
    messages: list[dict[str, Any]],
    session: str | None = None,
    body: dict[str, Any] | None = None,
    **headers: str,
) -> httpx.Response:
    named = {} if session is None else {"x-session-id": session}
    named |= {f"x-session-{name}": value for name, value in headers.items()}
    whole = {"messages": messages, "temperature": 0, "max_tokens": MOST, "return_token_ids": True}
    return await client.post(CHAT, json=whole | (body or {}), headers=named)


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_an_id_that_is_for_affinity_too_names_no_session(client: httpx.AsyncClient) -> None:
    """opencode sends it with its conversation and with the request for a title, which has rules of its own."""
    told = user("My dog is called Rex.")
    await ask(client, [OTHER_RULES, user("Write a title."), told], "ses_1", affinity="ses_1")
    reply = await ask(client, [RULES, told], "ses_1", affinity="ses_1")
    again = await ask(client, [RULES, told, answer(reply), user("Who?")], "ses_1", affinity="ses_1")
    assert cached(again) >= reply["usage"]["prompt_tokens"]
    assert (await client.get("/v1/kedge/sessions")).json()["sessions"] == []


@pytest.mark.parametrize("session", [None, "named"])
async def test_a_turn_with_its_whole_history_costs_what_is_new(
    client: httpx.AsyncClient, session: str | None
) -> None:
    """With the header the history used to be appended to itself: 41, 123, 235 prompt tokens in place of 41, 74, 104."""
    messages = [RULES]
    held = 0
    for turn in range(6):
        messages.append(user(f"question {turn}"))
        reply = await ask(client, messages, session)
        # All tokens of the answer but the last have KV. The null model's text may be tokenized differently.
        if turn > 1:
            assert cached(reply) >= held
        held = reply["usage"]["prompt_tokens"]
        messages.append(answer(reply))


async def test_what_was_said_is_not_rendered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    render = ChatTemplate._render

    def counted(self: ChatTemplate, messages: Any, *args: Any, **kwargs: Any) -> str:
        text = render(self, messages, *args, **kwargs)
        rendered.append(len(text))
        return text

    async with local_client(tmp_path) as (client, _):
        messages, costs = [RULES], []
        for turn in range(8):
            messages.append(user(f"question {turn}"))
            with monkeypatch.context() as patch:
                patch.setattr(ChatTemplate, "_render", counted)
                rendered.clear()
                reply = await ask_unchecked(client, messages)
                costs.append(sum(rendered))
            messages.append(answer(reply))
    assert max(costs[2:]) < 1.5 * min(costs[2:]), costs


@pytest.mark.parametrize("session", [None, "named"])
async def test_a_long_history_does_not_wait_behind_long_prompts(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, session: str | None
) -> None:
    """A conversation used to count as long by all that was said, however short its new part was, so it waited for a
    thread."""
    monkeypatch.setattr(turn_request, "LONG_PROMPT", 240)
    monkeypatch.setattr(turn_request, "VALUE_WEIGHT", 1)
    worked_on: list[bool] = []
    encode = TextProcessor._encode

    def noted(self: TextProcessor, *args: Any, **kwargs: Any) -> list[int]:
        worked_on.append(threading.current_thread() is threading.main_thread())
        return encode(self, *args, **kwargs)

    messages = [RULES, user("word " * 50)]
    for turn, new in enumerate(["next", "more", "word " * 50]):
        with monkeypatch.context() as patch:
            patch.setattr(TextProcessor, "_encode", noted)
            worked_on.clear()
            reply = await ask_unchecked(client, messages, session)
        assert worked_on
        assert all(worked_on) == (turn > 1), "the long question, and the one behind it"
        messages += [answer(reply), user(new)]
    with monkeypatch.context() as patch:
        patch.setattr(TextProcessor, "_encode", noted)
        worked_on.clear()
        await ask_unchecked(client, messages, session)
    assert not any(worked_on), "the new part is long"


async def ask_unchecked(
    client: httpx.AsyncClient, messages: list[dict[str, Any]], session: str | None = None
) -> dict[str, Any]:
    reply = await sent(client, messages, session)
    assert reply.status_code == 200, reply.text
    said: dict[str, Any] = reply.json()
    return said


@pytest.mark.parametrize("session", [None, "named"])
async def test_an_answer_that_is_asked_for_again_is_made_anew(
    client: httpx.AsyncClient, session: str | None
) -> None:
    first = [user("one")]
    begun = [*first, answer(await ask(client, first, session)), user("two")]
    once = await ask(client, begun, session)
    again = await ask(client, begun, session)
    assert once["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    assert cached(again) > 0


@pytest.mark.parametrize("session", [None, "named"])
async def test_an_edited_answer_is_what_was_said(client: httpx.AsyncClient, session: str | None) -> None:
    first = [user("one")]
    await ask(client, first, session)
    edited = [*first, {"role": "assistant", "content": "Edited."}, user("two")]
    reply = await ask(client, edited, session)
    await ask(client, [*edited, answer(reply), user("three")], session)


async def test_two_branches_at_once_are_both_gone_on_with(client: httpx.AsyncClient) -> None:
    first = [user("one")]
    begun = [*first, answer(await ask(client, first))]
    second = [*begun, user("two")]
    begun = [*second, answer(await ask(client, second))]
    branches = [[*begun, user(f"branch {number}")] for number in range(4)]
    replies = await asyncio.gather(*(ask(client, messages) for messages in branches))
    await asyncio.gather(
        *(
            ask(client, [*messages, answer(reply), user("on")])
            for messages, reply in zip(branches, replies, strict=True)
        )
    )


async def test_another_system_prompt_is_another_history(client: httpx.AsyncClient) -> None:
    messages = [RULES, user("one")]
    messages = [*messages, answer(await ask(client, messages, "s")), user("two")]
    changed = [OTHER_RULES, *messages[1:]]
    refused = await sent(client, changed, "s")
    assert refused.status_code == 409
    assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == (
        "history_differs",
        "messages[0]",
    )
    await ask(client, messages, "s")
    await ask(client, changed)


async def test_other_tools_are_refused_in_a_session_and_begin_anew_without_one(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    first = [user("one")]
    messages = [*first, answer(await ask(client, first, "s")), user("two")]
    refused = await sent(client, messages, "s", {"tools": [TOOL], "tool_choice": "none"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "tools_differ")
    anew = await sent(client, messages, None, {"tools": [TOOL], "tool_choice": "none"})
    assert anew.status_code == 200
    assert len(service.rig.unnamed) == 1


async def test_a_history_that_differs_is_named_and_nothing_is_lost(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    first = [RULES, user("one")]
    messages = [*first, answer(await ask(client, first, "s")), user("two")]
    for mode in ("auto", "full"):
        differs = [RULES, user("another"), *messages[2:]]
        refused = await sent(client, differs, "s", mode=mode)
        assert (refused.status_code, refused.json()["error"]["param"]) == (409, "messages[1]")
    assert service.rig.sessions.status("s").turns == 1
    await ask(client, messages, "s")


async def test_a_first_message_that_is_sent_again_is_ambiguous(client: httpx.AsyncClient) -> None:
    first = [user("one")]
    reply = await ask(client, first, "s")
    refused = await sent(client, first, "s")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "ambiguous_history")
    await ask(client, first, "s", mode="full")
    appended = await sent(client, first, "s", mode="append")
    assert appended.json()["usage"]["prompt_tokens"] > len(tokens_of([*first, answer(reply)]))


async def test_a_first_message_is_a_new_one_later_if_others_were_added(client: httpx.AsyncClient) -> None:
    """Its client sends new messages only, which the second turn has shown. It used to be refused as ambiguous."""
    lengths = []
    for content in ("one", "one more", "one"):
        reply = await sent(client, [user(content)], "s")
        assert reply.status_code == 200
        lengths.append(reply.json()["usage"]["prompt_tokens"])
    assert lengths[2] > lengths[1] + lengths[0]


async def test_a_session_that_begins_with_an_example_takes_new_messages(client: httpx.AsyncClient) -> None:
    """Its client used to be taken for one that sends whole histories: the next turn was refused, 409."""
    messages = [user("an example"), {"role": "assistant", "content": "its answer"}, user("one")]
    messages += [answer(await ask(client, messages, "s")), user("two")]
    appended = await sent(client, messages[-1:], "s")
    assert appended.status_code == 200
    assert appended.json()["usage"]["prompt_tokens"] > len(tokens_of(messages[:3])) + MOST
    await ask(client, [*messages, answer(appended.json()), user("three")], "s")


async def test_a_client_that_sent_whole_histories_goes_on_so(client: httpx.AsyncClient) -> None:
    first = [user("one")]
    second = [*first, answer(await ask(client, first, "s")), user("two")]
    await ask(client, second, "s")
    await ask(client, first, "s")
    refused = await sent(client, [user("something else")], "s")
    assert refused.json()["error"]["code"] == "history_differs"


async def test_a_system_prompt_beside_new_messages_is_not_said_twice(client: httpx.AsyncClient) -> None:
    for session, head in (("with", [RULES]), ("without", [])):
        await ask(client, [RULES, user("one")], session)
        reply = await sent(client, [*head, user("two")], session)
        assert reply.status_code == 200
        if session == "with":
            expected = reply.json()["usage"]["prompt_tokens"]
    assert reply.json()["usage"]["prompt_tokens"] == expected


async def test_a_turn_is_refused_that_is_not_the_expected_one(client: httpx.AsyncClient) -> None:
    reply = await sent(client, [user("one")], "s", turn="0")
    assert (reply.status_code, reply.headers["x-session-turn"]) == (200, "0")
    refused = await sent(client, [user("two")], "s", turn="0")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "turn_differs")
    assert "is 1, not 0" in refused.json()["error"]["message"]
    assert (await sent(client, [user("two")], "s", turn="1")).status_code == 200


async def test_tenants_find_nothing_of_each_other(client: httpx.AsyncClient, service: LocalService) -> None:
    first = [user("one")]
    messages = [*first, answer(await ask(client, first)), user("two")]
    body = {"messages": messages, "temperature": 0, "max_tokens": MOST}
    reply = await client.post(CHAT, json=body, headers={"x-tenant-id": "other"})
    assert cached(reply.json()) == 0
    assert len(service.rig.unnamed) == 2


async def test_nothing_stays_of_unnamed_conversations_that_are_forgotten(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    messages = [user("one")]
    for turn in range(3):
        messages += [answer(await ask(client, messages)), user(f"more {turn}")]
    unnamed = service.rig.unnamed
    assert (len(unnamed), unnamed._num_tokens > 0) == (1, True)
    unnamed.forget_all()
    assert (len(unnamed), unnamed._num_tokens, len(unnamed._by_digest)) == (0, 0, 0)
    assert await service.flush()
    await service.rig.books_are_empty()
    await ask(client, messages)


async def test_a_conversation_that_outlives_its_checkpoints_leaves_none(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controllers.held_session.MOST_CHECKPOINTS", 2)
    messages: list[dict[str, Any]] = []
    for turn in range(5):
        messages.append(user(f"question {turn}"))
        messages.append(answer(await ask(client, messages)))
    unnamed = service.rig.unnamed
    assert len(unnamed) == 1
    assert len(unnamed._by_digest) == 2
    unnamed.forget_all()
    assert not unnamed._by_digest


async def test_conversations_that_have_ended_leave_nothing_behind(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    """A replica noted the id of each unnamed conversation for a report that nobody makes, and kept it for good."""
    for index in range(3):
        await ask(client, [user(f"{index}")])
    unnamed = service.rig.unnamed
    unnamed.forget_all()
    await unnamed.expire_idle()
    assert unnamed._sessions.take_changed() == set()
