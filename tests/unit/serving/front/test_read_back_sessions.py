"""A session's history is read back, forked and rewound by its turns. It survives when its owner lets the session go."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from controllers.session_keys import session_key
from serving.front.http import create_http_app
from serving.text.chat_template import ChatTemplate
from serving.text.text import TextProcessor
from serving.wire.turns import ChatPrompt
from tests.unit.serving.front.test_whole_conversations import RULES, answer, ask, cached, sent, user
from tests.unit.serving.local_service import MODEL, LocalService, client_of
from tests.unit.serving.replica_rig import VOCAB_SIZE, running_rig
from tests.unit.serving.small_tokenizer import CHATML, byte_level_tokenizer

SESSION = "/v1/kedge/sessions/named"


async def read(client: httpx.AsyncClient, path: str = SESSION) -> dict[str, Any]:
    reply = await client.get(path, params={"messages": "true"})
    assert reply.status_code == 200, reply.text
    said: dict[str, Any] = reply.json()
    return said


async def let_go(service: LocalService) -> None:
    """Lets the session go, as when it moves: its next owner has only what the log has."""
    await service.rig.host.release(session_key("", "named"))


async def append(client: httpx.AsyncClient, *texts: str) -> list[dict[str, Any]]:
    """Sends each text as a turn. Returns all messages of the conversation."""
    said: list[dict[str, Any]] = []
    for text in texts:
        reply = await sent(client, [user(text)], "named", mode="append")
        assert reply.status_code == 200, reply.text
        said += [user(text), answer(reply.json())]
    return said


@pytest.mark.parametrize("moves", [False, True])
async def test_what_was_said_is_read_back(
    client: httpx.AsyncClient, service: LocalService, moves: bool
) -> None:
    said = await append(client, "one", "two")
    if moves:
        await let_go(service)
    session = await read(client)
    assert session["messages"] == said
    assert [each["turn"] for each in session["checkpoints"]] == [0, 1]
    assert [each["messages"] for each in session["checkpoints"]] == [2, 4]
    assert session["checkpoints"][-1]["tokens"] == session["tokens"]
    assert "messages" not in (await client.get(SESSION)).json()


async def test_whole_histories_are_read_back_as_their_client_last_sent_them(
    client: httpx.AsyncClient,
) -> None:
    first = [RULES, user("one")]
    second = [*first, answer(await ask(client, first, "named")), user("two")]
    third = [*second, answer(await ask(client, second, "named")), user("three")]
    last = answer(await ask(client, third, "named"))
    assert (await read(client))["messages"] == [*third, last]
    edited = [*second[:2], {"role": "assistant", "content": "edited"}, user("and now")]
    last = answer(await ask(client, edited, "named"))
    assert (await read(client))["messages"] == [*edited, last]


async def test_text_turns_and_answers_are_read_back(client: httpx.AsyncClient) -> None:
    body = {"prompt": "Once upon", "max_tokens": 3, "temperature": 0}
    reply = await client.post("/v1/completions", json=body, headers={"x-session-id": "named"})
    text = reply.json()["choices"][0]["text"]
    assert (await read(client))["messages"] == [
        {"role": "text", "content": "Once upon"},
        {"role": "text", "content": text},
    ]


async def test_a_session_that_has_moved_is_still_whole(
    client: httpx.AsyncClient, service: LocalService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next owner renders only what is new and recognizes the history in a conversation that is sent whole. Its fork
    does so, too."""
    rendered: list[int] = []
    render = ChatTemplate._render

    def counted(self: ChatTemplate, messages: Any, *args: Any, **kwargs: Any) -> str:
        text = render(self, messages, *args, **kwargs)
        rendered.append(len(text))
        return text

    messages = [RULES]
    costs = []
    for turn in range(8):
        messages.append(user(f"question {turn}"))
        if turn in (3, 6):
            await let_go(service)
        with monkeypatch.context() as patch:
            patch.setattr(ChatTemplate, "_render", counted)
            rendered.clear()
            reply = await sent(client, messages, "named")
            costs.append(sum(rendered))
        assert reply.status_code == 200, reply.text
        messages.append(answer(reply.json()))
    assert max(costs[2:]) < 1.5 * min(costs[2:]), costs
    await let_go(service)
    # Only the first question again. This client always sends the whole conversation, so the session goes back to
    # there.
    await ask(client, messages[:2], "named")


async def test_a_fork_by_turn_has_what_was_said_until_then(client: httpx.AsyncClient) -> None:
    said = await append(client, "one", "two", "three")
    forked = await client.post(f"{SESSION}/fork", json={"new_session_id": "child", "turn": 1})
    assert forked.status_code == 200, forked.text
    child = await read(client, "/v1/kedge/sessions/child")
    assert child["messages"] == said[:4]
    assert [each["turn"] for each in child["checkpoints"]] == [None, None]
    whole = [*said[:4], user("three")]
    assert cached(await ask(client, whole, "child")) > 0
    assert (await read(client, "/v1/kedge/sessions/child"))["messages"][:5] == whole
    both = await client.post(f"{SESSION}/fork", json={"turn": 1, "length": 3})
    assert both.status_code == 400


@pytest.mark.parametrize("moves", [False, True])
async def test_a_session_rewinds_to_a_turn(
    client: httpx.AsyncClient, service: LocalService, moves: bool
) -> None:
    said = await append(client, "one", "two", "three")
    before = await read(client)
    if moves:
        await let_go(service)
    rewound = await client.post(f"{SESSION}/rewind", json={"turn": 0})
    assert rewound.status_code == 200, rewound.text
    assert rewound.json() == {"session_id": "named", "tokens": before["checkpoints"][0]["tokens"]}
    after = await read(client)
    assert after["messages"] == said[:2]
    assert (after["tokens"], after["turns"]) == (before["checkpoints"][0]["tokens"], 4)
    # The same turn gets the same answer again.
    again = await append(client, "two")
    assert (await read(client))["messages"] == [*said[:2], *again] == said[:4]
    gone = await client.post(f"{SESSION}/rewind", json={"turn": 2})
    assert (gone.status_code, gone.json()["error"]["param"]) == (400, "turn")


async def test_a_session_rewinds_to_a_token_and_not_past_its_end(client: httpx.AsyncClient) -> None:
    await append(client, "one", "two")
    first, last = (await read(client))["checkpoints"]
    past = await client.post(f"{SESSION}/rewind", json={"length": last["tokens"] + 1})
    assert past.status_code == 400, past.text
    unclear = await client.post(f"{SESSION}/rewind", json={})
    assert unclear.status_code == 400
    cut = await client.post(f"{SESSION}/rewind", json={"length": first["tokens"] - 1})
    assert cut.status_code == 200
    # The first answer is cut, so turn 0 can no longer be named.
    assert (await client.post(f"{SESSION}/rewind", json={"turn": 0})).status_code == 400
    nothing = await client.post(f"{SESSION}/rewind", json={"length": 0})
    assert nothing.status_code == 200
    assert (await read(client))["messages"] == []


async def test_only_turns_that_can_be_named_are_told_to_who_names_another(client: httpx.AsyncClient) -> None:
    """A cut turn used to be in the list, though it was refused."""
    await append(client, "one", "two")
    last = (await read(client))["checkpoints"][-1]
    await client.post(f"{SESSION}/rewind", json={"length": last["tokens"] - 1})
    refused = await client.post(f"{SESSION}/fork", json={"turn": 1})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "turn_not_found")
    assert error["message"].endswith("Its last whole turns: 0.")


async def test_sessions_that_nobody_has_are_not_found(client: httpx.AsyncClient) -> None:
    for path, body in (("rewind", {"turn": 0}), ("rewind", {"length": 0}), ("fork", {"turn": 0})):
        reply = await client.post(f"{SESSION}/{path}", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "session_not_found"), reply.text
    assert (await client.get(SESSION, params={"messages": "true"})).status_code == 404


async def test_what_a_note_said_is_forgotten_and_the_session_goes_on(
    client: httpx.AsyncClient, service: LocalService
) -> None:
    said = await append(client, "one", "two")
    await service.forget_note("named", 0, tenant="")
    assert (await read(client))["messages"] == said[2:]
    await let_go(service)
    await append(client, "three")


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
async def test_an_integer_that_does_not_travel_is_refused_by_name(
    client: httpx.AsyncClient, number: int
) -> None:
    """The call to a replica could not be encoded, which used to be a 500."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"maximum": number}}}}
    body = {"messages": [user("hi 1234567890123456789012")], "max_tokens": 1}
    tools = [{"type": "function", "function": function}]
    reply = await client.post("/v1/chat/completions", json=body | {"tools": tools})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].endswith("x.maximum")
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    "arguments",
    [
        f'{{"wei": {2**64}}}',
        f'{{"wei": {-(10**30)}}}',
        f'{{"messages": [{{"content": [{{"input": {{"wei": {2**64}}}}}]}}]}}',
    ],
)
async def test_arguments_with_an_integer_that_does_not_travel_stay_text(
    client: httpx.AsyncClient, service: LocalService, arguments: str
) -> None:
    """A model may write integers of any size in a call, and in any shape, such as that of a body of Anthropic's. Every
    later turn of the conversation used to be a 500."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answered = {"role": "tool", "tool_call_id": "c", "content": "sent"}
    messages = [user("hi"), {"role": "assistant", "tool_calls": [call]}, answered]
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": "sent"},
    ]
    reply = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    assert isinstance(service.calls[-1].prompt, ChatPrompt)
    (told,) = service.calls[-1].prompt.messages[1]["tool_calls"]
    assert told["function"]["arguments"] == arguments
    reply = await client.post("/v1/responses", json={"input": items, "max_output_tokens": 16})
    assert reply.status_code == 200, reply.text


async def test_an_answer_that_is_opened_otherwise_later_takes_no_words_along(tmp_path: Path) -> None:
    """Some templates begin a thought in the prompt but write earlier answers without it. The history then differs from
    the prompt within what opened its last answer. This opening used to be taken for a part of the question. All stored
    responses before the last were lost, and later ones went on without what had been said."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    text = TextProcessor(
        byte_level_tokenizer(template), vocab_size=VOCAB_SIZE, max_context_len=MODEL.max_context_len
    )
    async with running_rig(tmp_path, text=text) as rig, AsyncExitStack() as stack:
        service = LocalService(rig)
        client = await stack.enter_async_context(client_of(create_http_app(service)))
        told: list[str] = []
        for turn in range(4):
            goes_on = {"previous_response_id": told[-1]} if told else {}
            body = {"input": f"question {turn}", "max_output_tokens": 4, "temperature": 0, **goes_on}
            reply = await client.post("/v1/responses", json=body)
            assert reply.status_code == 200, reply.text
            told.append(reply.json()["id"])
        prompt = service.calls[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        questions = [each["content"] for each in prompt.messages if each["role"] == "user"]
        assert questions == [f"question {turn}" for turn in range(4)]
        assert [(await client.get(f"/v1/responses/{each}")).status_code for each in told] == [200] * 4

        messages: list[dict[str, Any]] = []
        for turn in range(3):
            messages.append(user(f"question {turn}"))
            reply = await sent(client, messages, "named")
            messages.append(answer(reply.json()))
        await let_go(service)
        said = await read(client)
        assert said["messages"] == messages
        assert [each["turn"] for each in said["checkpoints"]] == [0, 1, 2]
        notes = rig.controller.cluster.notes.page("named", "")
        assert max(len(note.note) for note in notes) < 2 * min(len(note.note) for note in notes)


async def test_an_answer_that_is_made_anew_takes_the_place_of_the_one_before(
    client: httpx.AsyncClient,
) -> None:
    question = [user("one")]
    await ask(client, question, "named", mode="full")
    again = answer(await ask(client, question, "named", mode="full"))
    assert (await read(client))["messages"] == [*question, again]
