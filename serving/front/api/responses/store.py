"""Responses that can be had again: turns of hidden sessions, in the session log.

A stored response is a turn of a session that its id names. One that goes on from the last response of a session is that
session's next turn, if it has the same instructions and tools; one that goes on from an earlier response is a turn of a
fork. With other instructions or tools it begins a session with all that was said. So each is in the log, and survives
what a session survives; it is kept as long as its session is.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from engine.api import SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.openai.answers import AnswerReader
from serving.front.api.openai.thoughts import reads_thoughts
from serving.front.api.responses.items import Json
from serving.front.api.responses.replies import ResponseHead, ResponseReader
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.tools import OfferedTools, offered_tools
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
NO_SESSION = "session_not_found"
NO_RESPONSE = "response_not_found"
_BEGUN = "begun"
_ENDED = "ended"
"""In a note of a turn that says nothing: of which response it tells this."""


def new_response_id(session_id: str | None) -> str:
    """Of a response that is a turn of this session (None: of none)."""
    scope = uuid4().hex if session_id is None else session_id.removeprefix(_SESSION)
    return f"{_ID}{scope}{uuid4().hex[:16]}"


def session_of(response_id: str, param: str = "response_id") -> str:
    """Raises ServiceError for what is no id of a response."""
    scope = response_id.removeprefix(_ID)
    if not response_id.startswith(_ID) or len(scope) <= _SESSION_CHARS:
        raise _unknown(response_id, param)
    return f"{_SESSION}{scope[:_SESSION_CHARS]}"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` is its request without the input; `input` has the items of that. `before` is all that was said before,
    where the turns before it do not have just that, as where it begins its session. `turn_index` is the
    number of its turn, `end` all of that; None: it was begun in the background, and the log has no end of it."""

    head: ResponseHead
    before: list[Json] | None
    input: list[Json]
    body: ResponsesBody
    turn_index: int
    end: TurnEvent | None

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
        whole = TurnEvent(
            text=turn.said.answer,
            prompt_tokens=turn.asked_len,
            cached_tokens=turn.said.cached_tokens,
            completion_tokens=turn.said.num_output,
            finish=turn.said.finish,
            in_thought=turn.said.in_thought,
        )
        return cls._noted(turn.said.key, json.loads(turn.said.note), model, turn.turn_index, whole)

    @classmethod
    def begun(cls, turn: TurnTranscript, said: Json, model: ModelInfo) -> StoredResponse:
        """`turn` says that it has begun: the next one is to be its own."""
        return cls._noted(said[_BEGUN], said, model, turn.turn_index + 1, None)

    @classmethod
    def _noted(
        cls, response_id: str, said: Json, model: ModelInfo, turn_index: int, end: TurnEvent | None
    ) -> StoredResponse:
        body = ResponsesBody.model_validate(said["body"] | {"input": "-"}, strict=False)
        head = ResponseHead(response_id, model.model_id, body.repeated(), said["created_at"])
        return cls(head, said["before"], said["input"], body, turn_index, end)

    @property
    def is_completed(self) -> bool:
        """Whether its turn is part of its session, and can be gone on from."""
        end = self.end
        return end is not None and end.finish is not None and end.finish.reason != "abort"

    def response(self, model: ModelInfo) -> Json:
        """As its client was told it. It has ended."""
        assert self.end is not None
        reader = self.reader(model)
        if self.end.error is not None:
            reader.read(replace(self.end, error=None))
            return self.head.failed(self.end.error, reader.items)
        reader.read(self.end)
        response = reader.response(self.end)
        assert response is not None
        return response

    def reader(self, model: ModelInfo) -> ResponseReader:
        """For its turn's events, from the first one on."""
        tools = offered_tools(self.body.tools, self.body.tool_choice, self.body.parallel_tool_calls, model)
        return ResponseReader(
            self.head,
            AnswerReader(calls_named_by(self.head.id), tools.use, self._reasoning(tools, model)),
            tools,
            encrypts_reasoning=self.body.encrypts_reasoning,
        )

    def _reasoning(self, tools: OfferedTools, model: ModelInfo) -> ReasoningName | None:
        held = self.body.held()
        if tools.use is not None:
            return reads_thoughts(model, tools.use.constraint(held))
        return reads_thoughts(model, None if held is None else held.constraint)


@dataclass(frozen=True, slots=True)
class Continued:
    """What a new response goes on from. `items` is all that was said before, inputs and outputs.

    `session_id` None: it is not stored. `fork_of` and `fork_len`: the session begins with so many tokens of that one.
    `next_turn` is the number of its turn there; 0 in a new session. `has_more`: the items are more than its turns say.
    """

    session_id: str | None
    items: tuple[Json, ...] = ()
    fork_of: str | None = None
    fork_len: int = 0
    next_turn: int = 0
    has_more: bool = False

    @property
    def begins_session(self) -> bool:
        """Whether the response is the first of its session."""
        return self.session_id is not None and self.next_turn == 0

    async def make_fork(self, service: TurnService, tenant: str) -> None:
        """What the turn's session begins with, if it is a fork. Raises ServiceError."""
        if self.session_id is not None and self.fork_of is not None:
            await service.fork_session(
                self.fork_of, self.session_id, length=self.fork_len, timeout_s=None, tenant=tenant
            )

    def turn(self, head: ResponseHead, items: Sequence[Json], body: ResponsesBody) -> SessionTurn | None:
        """The turn to be, with the new items. A fork is to be made before it runs."""
        if self.session_id is None:
            return None
        begins = self.fork_of is None and self.next_turn == 0
        return SessionTurn(
            self.session_id,
            idempotency_key=head.id,
            create=begins,
            expected_turn=self.next_turn,
            mode="full",
            note=StoredResponse.note(head, self.items if begins or self.has_more else None, items, body),
        )


async def continued(service: TurnService, body: ResponsesBody, tenant: str) -> Continued:
    """Raises ServiceError (404) for a response that is not there, or not all of what it went on from."""
    if body.previous_response_id is None:
        return begun(body)
    turns, at, previous = await _found(service, body.previous_response_id, tenant, "previous_response_id")
    if not previous.is_completed:
        raise refusal(
            "previous_response_id: only a response that has been completed can be gone on from.",
            "previous_response_id",
        )
    items = tuple(_said(turns[: at + 1], service.model, body.previous_response_id))
    return await _behind(service, _Found(turns, at, previous), items, body, tenant)


async def continued_with(
    service: TurnService, items: Sequence[Json], last_id: str | None, body: ResponsesBody, tenant: str
) -> Continued:
    """The same of all that was said in a conversation, whose last response was `last_id`: in the session of that, as
    long as the items begin with what that has."""
    anew = begun(body, items)
    if last_id is None:
        return anew
    try:
        found = await _found(service, last_id, tenant)
        said = _said(found.turns[: found.at + 1], service.model, last_id)
    except ServiceError as error:
        if error.info.code != NO_RESPONSE:
            raise
        return anew
    if not found.stored.is_completed or list(items[: len(said)]) != said:
        return anew
    behind = await _behind(service, found, anew.items, body, tenant)
    return dataclasses.replace(behind, has_more=len(said) < len(items))


async def _behind(
    service: TurnService, found: _Found, items: tuple[Json, ...], body: ResponsesBody, tenant: str
) -> Continued:
    """What goes on from a response with all these items."""
    turns, at, previous = found
    session_id = session_of(previous.head.id)
    anew = begun(body, items)
    if not body.is_stored or _beginning(previous.body, service.model) != _beginning(body, service.model):
        return anew
    session = await service.session(session_id, tenant=tenant)
    is_last = at == len(turns) - 1 and not turns[at].is_cut
    if session is not None and is_last and not session.in_turn:
        return Continued(session_id, items, next_turn=session.turns)
    return dataclasses.replace(anew, fork_of=session_id, fork_len=turns[at].end_len)


def begun(body: ResponsesBody, items: Iterable[Json] = ()) -> Continued:
    """With a session of its own, if it is to be stored, and all that was said before."""
    return Continued(f"{_SESSION}{uuid4().hex}" if body.is_stored else None, tuple(items))


async def note_begun(service: TurnService, turn: SessionTurn, tenant: str) -> SessionTurn:
    """Has the log say that the response of this turn has begun, in a turn before it. Gives the turn as it is to be run
    now. Raises ServiceError."""
    note = json.dumps({_BEGUN: turn.idempotency_key} | json.loads(turn.note)).encode()
    if turn.create:
        await service.open_session(turn.session_id, timeout_s=None, capacity_tokens=None, tenant=tenant)
    await service.keep_note(turn.session_id, note, expected_turn=turn.expected_turn, tenant=tenant)
    return replace(turn, create=False, expected_turn=(turn.expected_turn or 0) + 1)


async def note_ended(
    service: TurnService, response_id: str, turn_index: int, end: TurnEvent, tenant: str
) -> None:
    """Has the log say, in the place of its turn, how a response that had begun came to no end of its own.

    Raises ServiceError: (409, "turn_in_flight") while its turn runs, (409, "turn_differs") if it had an end.
    """
    note = json.dumps({_ENDED: response_id, "turn": msgspec.to_builtins(end)}).encode()
    await service.keep_note(session_of(response_id), note, expected_turn=turn_index, tenant=tenant)


async def find_response(service: TurnService, response_id: str, tenant: str) -> StoredResponse:
    """Raises ServiceError (404)."""
    return (await _found(service, response_id, tenant)).stored


async def forget_response(service: TurnService, response_id: str, tenant: str) -> None:
    """Its session goes on without what it said; with its last response the session ends. Raises ServiceError (404)."""
    turns = (await _found(service, response_id, tenant)).turns
    session_id = session_of(response_id)
    noted = [turn for turn in turns if turn.said.note and turn.turn_index >= 0]
    its_own = [turn for turn in noted if response_of(turn) == response_id]
    if len(noted) == len(its_own):
        await service.close_session(session_id, tenant=tenant)
        return
    for turn in its_own:
        await service.forget_note(session_id, turn.turn_index, tenant=tenant)


class _Found(NamedTuple):
    """The turns of a response's session, which of them is its own, and what it is."""

    turns: list[TurnTranscript]
    at: int
    stored: StoredResponse


async def _found(service: TurnService, response_id: str, tenant: str, param: str = "response_id") -> _Found:
    """`param` is the field that names it. Raises ServiceError (404)."""
    try:
        turns = await service.transcript(session_of(response_id, param), tenant=tenant)
    except ServiceError as error:
        if error.info.code not in (NO_SESSION, NO_RESPONSE):
            raise
        turns = []
    unfinished: _Found | None = None
    for at, turn in enumerate(turns):
        if turn.turn_index < 0 or response_of(turn) != response_id:
            continue
        stored = StoredResponse.of(turn, service.model)
        if stored is not None:
            return _Found(turns, at, stored)
        said = json.loads(turn.said.note)
        if _BEGUN in said:
            unfinished = _Found(turns, at, StoredResponse.begun(turn, said, service.model))
        elif unfinished is not None:
            end = msgspec.convert(said["turn"], TurnEvent)
            unfinished = unfinished._replace(stored=dataclasses.replace(unfinished.stored, end=end))
    if unfinished is None:
        raise _unknown(response_id, param)
    return unfinished


def response_of(turn: TurnTranscript) -> str | None:
    """Of which response the turn is, or says that it has begun or ended."""
    if turn.said.key is not None or not turn.said.note:
        return turn.said.key if turn.said.note else None
    said = json.loads(turn.said.note)
    response_id: str | None = said.get(_BEGUN) or said.get(_ENDED)
    return response_id


def _said(turns: Sequence[TurnTranscript], model: ModelInfo, response_id: str) -> list[Json]:
    """All items up to the end of the last of these turns."""
    items: list[Json] = []
    for turn in turns:
        if turn.asked_len == turn.start_len:  # It says nothing, but that a response has begun or ended.
            continue
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
