"""Conversations without a name that are kept in the session log: their sessions, and turns that these do not take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from controllers.errors import Overloaded, TurnInFlight
from engine.api import AdapterNotLoaded, LogprobParams, SamplingParams
from serving.front.known_places import KnownPlaces
from serving.wire.turn_events import merge_events
from serving.wire.turns import (
    ChatPrompt,
    ErrorInfo,
    Fallback,
    OutputConstraint,
    ServiceError,
    SessionTurn,
    TurnCall,
    TurnEvent,
)
from tests.unit.serving.failover_rig import running_failover
from tests.unit.serving.replica_rig import call

TIMEOUT_S = 77.0
RULES = {"role": "system", "content": "Be short."}
TOOL = {"type": "function", "function": {"name": "look"}}


def asked(*texts: str, rules: bool = True, tenant: str = "", **fields: Any) -> TurnCall:
    """A turn of a conversation. After the rules, `texts` are questions and answers alternately."""
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    prompt = ChatPrompt((RULES, *said) if rules else tuple(said), tools=(TOOL,))
    return TurnCall("r", prompt, SamplingParams(), tenant=tenant, **fields)


def durable(*texts: str, **fields: Any) -> SessionTurn | None:
    """The session in which a front end of its own runs such a turn."""
    return KnownPlaces(100, durable_timeout_s=TIMEOUT_S).recognized(asked(*texts, **fields)).session


@pytest.mark.parametrize("rules", [True, False])
def test_from_its_second_turn_on_a_conversation_has_one_session(rules: bool) -> None:
    assert durable("one", rules=rules) is None, "most have no second turn"
    second = durable("one", "answer", "two", rules=rules)
    assert second is not None
    assert (second.mode, second.create, second.timeout_s, second.fallback) == (
        "full",
        True,
        TIMEOUT_S,
        "unnamed",
    )
    later = [str(number) for number in range(2002)]
    for more in (["b", "three"], ["b", *later]):
        assert durable("one", "answer", "two", *more, rules=rules) == second
    for other in (("one", "answer", "2"), ("one", "another", "two"), ("1", "answer", "two")):
        assert durable(*other, rules=rules) not in (None, second)


def test_each_tenant_has_sessions_of_its_own() -> None:
    mine, others = durable("one", "answer", "two", tenant="t"), durable("one", "answer", "two", tenant="u")
    assert mine is not None
    assert others is not None
    assert mine.session_id.startswith("t ")
    assert mine.session_id[1:] != others.session_id[1:]


def test_what_is_kept_elsewhere_or_nowhere() -> None:
    named = SessionTurn("s", mode="full")
    assert durable("one", "answer", "two", session=named) == named
    assert durable("one", "answer", "two", logprobs=LogprobParams(output=True, input_start=0)) is None
    assert durable("one", "answer", "two", cache_salt="salt") is None
    assert durable("one", "answer", "two", may_be_kept=False) is None
    unkept = KnownPlaces(100).recognized(asked("one", "answer", "two"))
    assert unkept.session is None


def in_session(fallback: Fallback | None, text: int = 5) -> TurnCall:
    turn = call([text, 6, 7], "s", max_new_tokens=30, request_id=f"r{text}")
    assert turn.session is not None
    return replace(turn, session=replace(turn.session, fallback=fallback))


@pytest.mark.parametrize("fallback", [None, "elsewhere", "unnamed"])
async def test_while_its_session_has_another_turn(tmp_path: Path, fallback: Fallback | None) -> None:
    async with running_failover(tmp_path) as served:
        served.open_session("s")
        first = served.rigs[0].events(in_session(None), 1)  # through another front end
        await anext(first)
        if fallback == "unnamed":
            second = await served.turn(in_session(fallback, 8))
            assert second.finish is not None
            assert (second.turn_index, second.prompt_tokens) == (None, 3)
        else:
            with pytest.raises(ServiceError) as caught:
                await served.turn(in_session(fallback, 8))
            assert caught.value.info.code == "turn_in_flight"
        rest = [event async for event in first]
        assert rest[-1].finish is not None
        assert served.committed("s")[0] == 1
        await served.settled()


async def test_of_turns_at_once_one_is_in_the_session_and_none_waits(tmp_path: Path) -> None:
    """Such as several choices, or what a program asks that begins all its requests with the same examples."""
    async with running_failover(tmp_path) as served:
        served.open_session("s")
        turns = await asyncio.gather(*(served.turn(in_session("unnamed", 5 + number)) for number in range(4)))
        assert sorted(str(each.turn_index) for each in turns) == ["0", "None", "None", "None"]
        assert sum(asked.session is not None for _, asked in served.replicas.calls) == 1
        await served.settled()


@pytest.mark.parametrize("lost", ["closed", "in another turn"])
async def test_a_turn_goes_on_elsewhere_although_its_session_takes_it_no_more(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client named no session, and must not hear of one."""
    async with running_failover(tmp_path) as served:
        served.open_session("s")
        calm = await served.turn(call([5, 6, 7], None, max_new_tokens=30))
        events = served.events(in_session("unnamed"))
        heard = [await anext(events) for _ in range(3)]
        if lost == "closed":
            served.cluster.close_session("s")
        else:
            monkeypatch.setattr(served.rigs[1].sessions, "begin_turn", busy)
        served.replicas.lose("a")
        heard += [event async for event in events]
        whole = merge_events(heard)
        assert (whole.error, whole.token_ids) == (None, calm.token_ids)


def busy(*_: Any, **__: Any) -> None:
    raise TurnInFlight("another turn is in flight")


async def test_a_session_of_another_model_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn begins it anew. It used to be loaded and refused at each turn."""
    async with running_failover(tmp_path) as served:
        served.open_session("s")
        turn = served.replicas.turn

        @asynccontextmanager
        async def changed(replica_id: str, call: TurnCall, epoch: int | None) -> AsyncIterator[Any]:
            if call.session is None:
                async with turn(replica_id, call, epoch) as events:
                    yield events
            else:
                yield aiter_of(TurnEvent(error=ErrorInfo(409, "model_changed", "another model")))

        monkeypatch.setattr(served.replicas, "turn", changed)
        answer = await served.turn(in_session("unnamed"))
        assert (answer.error, answer.completion_tokens) == (None, 30)
        assert served.cluster.sessions() == []


async def aiter_of(event: TurnEvent) -> AsyncIterator[TurnEvent]:
    yield event


async def test_where_no_more_sessions_may_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise Overloaded("no more sessions", retry_after_s=1.0)

    async with running_failover(tmp_path) as served:
        served.open_session("other")
        monkeypatch.setattr(served.controller, "resolve", refuse)
        answer = await served.turn(in_session("unnamed"))
        assert (answer.turn_index, answer.completion_tokens) == (None, 30)
        with pytest.raises(ServiceError) as caught:
            await served.turn(in_session(None))
        assert caught.value.info.code == "overloaded"
        await served.settled()


async def test_a_session_whose_owner_lacks_the_adapter_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn runs with its adapter all the same, where that is."""
    async with running_failover(tmp_path) as served:
        served.open_session("s")

        def lacks(call: TurnCall) -> None:
            if call.session is not None:
                raise AdapterNotLoaded("older settings")

        monkeypatch.setattr(served.rigs[0].builder, "check", lacks)
        answer = await served.turn(replace(in_session("unnamed"), adapter="a"))
        assert (answer.error, answer.completion_tokens) == (None, 30)
        told = [(asked.session is None, asked.adapter) for _, asked in served.replicas.calls]
        assert told == [(False, "a"), (True, "a")]
        await served.settled()


async def test_what_is_wrong_with_the_call_itself_is_the_clients(tmp_path: Path) -> None:
    async with running_failover(tmp_path) as served:
        served.open_session("s")
        wrong = replace(in_session("unnamed"), constraint=OutputConstraint("regex", "("))
        with pytest.raises(ServiceError) as caught:
            await served.turn(wrong)
        assert caught.value.info.code == "invalid_request"
        assert [asked.session is None for _, asked in served.replicas.calls] == [False]
        await served.settled()
