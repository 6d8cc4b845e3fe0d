"""Responses that can be had again: turns of hidden sessions, in the session log.

A stored response is a turn of a session that its id names. One that goes on from the last response of a session is that
session's next turn, if it has the same instructions and tools; one that goes on from an earlier response is a turn of a
fork. With other instructions or tools it begins a session with all that was said. So each is in the log, and survives
what a session survives; it is kept as long as its session is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from engine.api import SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.openai_answers import AnswerReader
from serving.front.api.responses_items import Json
from serving.front.api.responses_replies import ResponseHead, ResponseReader
from serving.front.api.responses_schema import ResponsesBody
from serving.front.api.responses_tools import OfferedTools, offered_tools
from serving.front.api.thoughts import reads_thoughts
from serving.text.reasoning.formats import ReasoningName
from serving.wire.turns import (
    ModelInfo,
    ServiceError,
    SessionTurn,
    TextPrompt,
    TurnCall,
    TurnEvent,
    TurnService,
    TurnTranscript,
)

_ID = "resp_"
_SESSION = "resp-"
_SESSION_CHARS = 32
_NO_SESSION = "session_not_found"
NO_RESPONSE = "response_not_found"


def new_response_id(session_id: str | None) -> str:
    """Of a response that is a turn of this session (None: of none)."""
    scope = uuid4().hex if session_id is None else session_id.removeprefix(_SESSION)
    return f"{_ID}{scope}{uuid4().hex[:16]}"


def _session_of(response_id: str, param: str = "response_id") -> str:
    """Raises ServiceError for what is no id of a response."""
    scope = response_id.removeprefix(_ID)
    if not response_id.startswith(_ID) or len(scope) <= _SESSION_CHARS:
        raise _unknown(response_id, param)
    return f"{_SESSION}{scope[:_SESSION_CHARS]}"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` is its request without the input; `input` has the items of that. `before` is all that was said before, of
    one that begins its session; None: the turns before it have it."""

    head: ResponseHead
    before: list[Json] | None
    input: list[Json]
    body: ResponsesBody
    turn: TurnTranscript

    @staticmethod
    def note(
        head: ResponseHead, before: Sequence[Json] | None, items: Sequence[Json], body: ResponsesBody
    ) -> bytes:
        """What the log keeps of it beside what its session has; see the attributes."""
        asked = body.model_dump(
            mode="json", by_alias=True, exclude={"input"}, exclude_unset=True, serialize_as_any=True
        )
        said = {"created_at": head.created_at, "before": before, "input": items, "body": asked}
        return json.dumps(said).encode()

    @classmethod
    def of(cls, turn: TurnTranscript, model: ModelInfo) -> StoredResponse | None:
        """None for a turn of which nothing is kept any more."""
        if not turn.said.note or turn.said.key is None:
            return None
        said = json.loads(turn.said.note)
        body = ResponsesBody.model_validate(said["body"] | {"input": "-"}, strict=False)
        head = ResponseHead(turn.said.key, model.model_id, body.repeated(), said["created_at"])
        return cls(head, said["before"], said["input"], body, turn)

    def response(self, model: ModelInfo) -> Json:
        """As its client was told it."""
        tools = offered_tools(self.body.tools, self.body.tool_choice, self.body.parallel_tool_calls, model)
        reader = ResponseReader(
            self.head,
            AnswerReader(calls_named_by(self.head.id), tools.use, self._reasoning(tools, model)),
            tools,
            encrypts_reasoning=self.body.encrypts_reasoning,
        )
        whole = TurnEvent(
            text=self.turn.said.answer,
            prompt_tokens=self.turn.asked_len,
            cached_tokens=self.turn.said.cached_tokens,
            completion_tokens=self.turn.said.num_output,
            finish=self.turn.said.finish,
            in_thought=self.turn.said.in_thought,
        )
        reader.read(whole)
        response = reader.response(whole)
        assert response is not None
        return response

    def _reasoning(self, tools: OfferedTools, model: ModelInfo) -> ReasoningName | None:
        held = self.body.held()
        if tools.use is not None:
            return reads_thoughts(model, tools.use.constraint(held))
        return reads_thoughts(model, None if held is None else held.constraint)


@dataclass(frozen=True, slots=True)
class Continued:
    """What a new response goes on from. `items` is all that was said before, inputs and outputs.

    `session_id` None: it is not stored. `fork_of` and `fork_len`: the session begins with so many tokens of that one.
    `next_turn` is the number of its turn there; 0 in a new session.
    """

    session_id: str | None
    items: tuple[Json, ...] = ()
    fork_of: str | None = None
    fork_len: int = 0
    next_turn: int = 0

    async def turn(
        self,
        service: TurnService,
        head: ResponseHead,
        items: Sequence[Json],
        body: ResponsesBody,
        tenant: str,
    ) -> SessionTurn | None:
        """The turn to be, with the new items; a fork is made now. Raises ServiceError."""
        if self.session_id is None:
            return None
        begins = self.fork_of is None and self.next_turn == 0
        if self.fork_of is not None:
            await service.fork_session(
                self.fork_of, self.session_id, length=self.fork_len, timeout_s=None, tenant=tenant
            )
        return SessionTurn(
            self.session_id,
            idempotency_key=head.id,
            create=begins,
            expected_turn=self.next_turn,
            mode="full",
            note=StoredResponse.note(head, self.items if begins else None, items, body),
        )


async def continued(service: TurnService, body: ResponsesBody, tenant: str) -> Continued:
    """Raises ServiceError (404) for a response that is not there, or not all of what it went on from."""
    if body.previous_response_id is None:
        return begun(body)
    turns, at = await _found(service, body.previous_response_id, tenant, "previous_response_id")
    session_id = _session_of(body.previous_response_id)
    items = tuple(_said(turns[: at + 1], service.model, body.previous_response_id))
    previous = StoredResponse.of(turns[at], service.model)
    assert previous is not None
    anew = begun(body, items)
    if not body.is_stored or _beginning(previous.body, service.model) != _beginning(body, service.model):
        return anew
    session = await service.session(session_id, tenant=tenant)
    is_last = at == len(turns) - 1 and not turns[at].is_cut
    if session is not None and is_last and not session.in_turn:
        return Continued(session_id, items, next_turn=session.turns)
    return replace(anew, fork_of=session_id, fork_len=turns[at].end_len)


def begun(body: ResponsesBody, items: Iterable[Json] = ()) -> Continued:
    """With a session of its own, if it is to be stored, and all that was said before."""
    return Continued(f"{_SESSION}{uuid4().hex}" if body.is_stored else None, tuple(items))


async def find_response(service: TurnService, response_id: str, tenant: str) -> StoredResponse:
    """Raises ServiceError (404)."""
    turns, at = await _found(service, response_id, tenant)
    stored = StoredResponse.of(turns[at], service.model)
    assert stored is not None
    return stored


async def forget_response(service: TurnService, response_id: str, tenant: str) -> None:
    """Its session goes on without what it said; with its last response the session ends. Raises ServiceError (404)."""
    turns, at = await _found(service, response_id, tenant)
    session_id = _session_of(response_id)
    others = [turn for turn in turns if turn.said.note and turn.turn_index >= 0 and turn is not turns[at]]
    if others:
        await service.forget_note(session_id, turns[at].turn_index, tenant=tenant)
    else:
        await service.close_session(session_id, tenant=tenant)


async def _found(
    service: TurnService, response_id: str, tenant: str, param: str = "response_id"
) -> tuple[list[TurnTranscript], int]:
    """The turns of the response's session, and which of them is its own. `param` is the field that names it."""
    try:
        turns = await service.transcript(_session_of(response_id, param), tenant=tenant)
    except ServiceError as error:
        if error.info.code not in (_NO_SESSION, NO_RESPONSE):
            raise
        turns = []
    for at, turn in enumerate(turns):
        if turn.said.key == response_id and turn.said.note and turn.turn_index >= 0:
            return turns, at
    raise _unknown(response_id, param)


def _said(turns: Sequence[TurnTranscript], model: ModelInfo, response_id: str) -> list[Json]:
    """All items up to the end of the last of these turns."""
    items: list[Json] = []
    for turn in turns:
        stored = StoredResponse.of(turn, model)
        if stored is None:
            raise refusal(
                f"previous_response_id: something that {response_id!r} went on from was deleted.",
                "previous_response_id",
                status=404,
                code=NO_RESPONSE,
            )
        if stored.before is not None:
            items = list(stored.before)
        items += [*stored.input, *stored.response(model)["output"]]
    return items


def _beginning(body: ResponsesBody, model: ModelInfo) -> Any:
    """What a prompt begins with, and is rendered by: a session has the same all the time."""
    use = offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls, model).use
    return body.instructions, body.template_kwargs, () if use is None else use.for_template()


def calls_named_by(response_id: str) -> TurnCall:
    """What an AnswerReader names a response's calls by, whatever session its turn is read from."""
    return TurnCall(response_id, TextPrompt(""), SamplingParams())


def _unknown(response_id: str, param: str = "response_id") -> ServiceError:
    return refusal(
        f"{param}: no response {response_id[:120]!r}. Responses are kept until their session has been idle for its "
        "timeout.",
        param,
        status=404,
        code=NO_RESPONSE,
    )
