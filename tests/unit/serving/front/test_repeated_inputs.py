"""Stored requests to /v1/responses that send the whole conversation again, as the Agents SDK does.

Each is the next turn of the session that has their items.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.serving.responses_client import GREEDY, Served, expected, user


class Talk:
    """A client's conversation. The client sends all of it each time."""

    def __init__(self, served: Served, items: list[dict[str, Any]] | None = None) -> None:
        self.served = served
        self.items = items or []

    async def ask(self, text: str, **fields: Any) -> Any:
        """Asks and checks the answer against that of a fresh request."""
        self.items.append(user(text))
        response = await self.served.client.responses.create(input=list(self.items), **GREEDY | fields)
        assert response.output_text == expected(self.items, fields.get("instructions"))
        assert response.output, "an answer without items has no id that tells where to go on"
        self.items += [item.model_dump(exclude_none=True) for item in response.output]
        return response

    def fork(self) -> Talk:
        return Talk(self.served, list(self.items))


def num_sessions(served: Served) -> int:
    return len(served.service.cluster.sessions())


async def test_they_are_turns_of_one_session(served: Served) -> None:
    talk = Talk(served)
    cached = 0
    for turn in range(5):
        response = await talk.ask(f"question {turn}")
        assert response.usage.input_tokens_details.cached_tokens >= cached
        cached = response.usage.input_tokens
    (session,) = served.service.cluster.sessions()
    assert session.turns == 5
    notes = [turn.said.note for turn in await served.service.transcript(session.session_id, tenant="")]
    assert max(map(len, notes)) < 1.2 * min(map(len, notes)), "the log has what is new alone"


async def test_all_that_was_sent_is_told_again(served: Served) -> None:
    talk = Talk(served)
    first = await talk.ask("one")
    sent = len(talk.items)
    second = await talk.ask("two")
    items = [item async for item in served.client.responses.input_items.list(second.id, order="asc")]
    assert [item.id for item in items[1:sent]] == [item.id for item in first.output]
    assert [item.content[0].text for item in items if item.role == "user"] == ["one", "two"]
    again = await served.client.responses.retrieve(second.id)
    assert again.output == second.output


async def test_two_go_on_from_the_same_place(served: Served) -> None:
    talk = Talk(served)
    await talk.ask("one")
    served.service.rig.runner.hold()
    left, right = talk, talk.fork()
    answering = asyncio.create_task(left.ask("left"))
    await served.service.rig.begun()
    beside = asyncio.create_task(right.ask("right"))
    await served.service.rig.begun(2)
    served.service.rig.runner.go_on()
    await asyncio.gather(answering, beside)
    for each in (left, right):
        response = await each.ask("on")
        assert response.usage.input_tokens_details.cached_tokens > 0
    assert num_sessions(served) == 2


async def test_a_question_that_is_asked_anew_is_answered_in_a_fork(served: Served) -> None:
    talk = Talk(served)
    await talk.ask("one")
    edited = talk.fork()
    await talk.ask("two")
    response = await edited.ask("three")
    assert response.usage.input_tokens_details.cached_tokens > 0
    assert num_sessions(served) == 2
    await edited.ask("four")
    await talk.ask("five")
    assert num_sessions(served) == 2


@pytest.mark.parametrize(
    "change", ["an answer", "a question", "no question", "other instructions", "deleted"]
)
async def test_what_differs_is_a_history_of_its_own(served: Served, change: str) -> None:
    talk = Talk(served)
    first = await talk.ask("one", instructions="Be short.")
    await talk.ask("two", instructions="Be short.")
    instructions = "Be short."
    match change:
        case "an answer":
            talk.items[1]["content"][0]["text"] += "!"
        case "a question":
            talk.items[0] = user("ones")
        case "no question":
            del talk.items[0]
        case "other instructions":
            instructions = "Be long."
        case "deleted":
            await served.client.responses.delete(first.id)
    response = await talk.ask("three", instructions=instructions)
    assert num_sessions(served) == 2
    on = await served.ask("four", previous_response_id=response.id, instructions=instructions)
    assert on.output_text == expected([*talk.items, user("four")], instructions)


@pytest.mark.parametrize("background", [False, True])
async def test_a_place_that_is_taken_meanwhile_is_forked(
    served: Served, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Both requests look at the session before the turn of either begins."""
    talk = Talk(served)
    await talk.ask("one")
    looked = asyncio.Barrier(2)
    session_now = served.service.session

    async def both_look(session_id: str, *, tenant: str) -> Any:
        session = await session_now(session_id, tenant=tenant)
        async with asyncio.timeout(20):
            await looked.wait()
        return session

    left, right = [*talk.items, user("left")], [*talk.items, user("right")]
    with monkeypatch.context() as patch:
        patch.setattr(served.service, "session", both_look)
        begun = await asyncio.gather(
            *(
                served.client.responses.create(input=list(items), background=background, **GREEDY)
                for items in (left, right)
            )
        )
    for items, response in zip((left, right), begun, strict=True):
        async with asyncio.timeout(20):
            while response.status in ("queued", "in_progress"):
                response = await served.client.responses.retrieve(response.id)
        assert response.output_text == expected(items), response.error
        again = await served.client.responses.retrieve(response.id)
        assert again.output == response.output
        assert [item.id for item in again.output] == [item.id for item in response.output]
        on = await served.ask("on", previous_response_id=response.id)
        answer = [item.model_dump(exclude_none=True) for item in response.output]
        assert on.output_text == expected([*items, *answer, user("on")])
        await served.client.responses.delete(response.id)
    assert num_sessions(served) == 2
