"""Responses that can be had again: turns of hidden sessions, in the session log.

A stored response is a turn of a session that its id names (continuations.py says of which). So it survives what a
session survives, and is kept as long as its session is.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import NAMESPACE_OID, uuid4, uuid5

import msgspec
from msgspec.structs import replace

from engine.api import SamplingParams
from serving.front.api.errors import refusal
from serving.front.api.openai.answers import AnswerReader, constraint_of, reads_thoughts
from serving.front.api.responses.items import Json
from serving.front.api.responses.replies import ResponseHead, ResponseReader
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.tools import offered_tools
from serving.wire.errors import SESSION_NOT_FOUND
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
NO_RESPONSE = "response_not_found"
_SCOPE = re.compile(r"[a-z]+_([0-9a-f]{48})o[0-9]+")
"""Of the id that an item of an answer has."""
_BEGUN = "begun"
_ENDED = "ended"
"""In a note of a turn that says nothing: of which response it tells this."""


def new_response_id(session_id: str | None) -> str:
    """Of a response that is a turn of this session (None: of none)."""
    scope = uuid4().hex if session_id is None else session_id.removeprefix(_SESSION)
    return f"{_ID}{scope}{uuid4().hex[:16]}"


def new_session_id() -> str:
    return f"{_SESSION}{uuid4().hex}"


def session_apart(response_id: str) -> str:
    """The session of a response whose turn has no place in the one that its id names, since another's came first."""
    return f"{_SESSION}{uuid5(NAMESPACE_OID, response_id).hex}"


def sessions_of(response_id: str, param: str = "response_id") -> tuple[str, str]:
    """Where the response may be: it is in the first one but for few. Raises ServiceError for what is no id of a
    response."""
    scope = response_id.removeprefix(_ID)
    if not response_id.startswith(_ID) or len(scope) <= _SESSION_CHARS:
        raise _unknown(response_id, param)
    return f"{_SESSION}{scope[:_SESSION_CHARS]}", session_apart(response_id)


def response_named(item_id: str | None) -> str | None:
    """The response whose answer had an item of this id; None for an id that is not of our making."""
    named = _SCOPE.fullmatch(item_id or "")
    return None if named is None else f"{_ID}{named[1]}"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`body` is its request without the input. `input` has the items of that; of one that `repeats` all that was said
    before, those behind that. `before` is all that was said before, where the turns before it do not have just that, as
    where it begins its session. `turn_index` is the number of its turn in the session, `end` all of that; None: it was
    begun in the background, and the log has no end of it."""

    head: ResponseHead
    repeats: bool
    before: list[Json] | None
    input: list[Json]
    body: ResponsesBody
    session_id: str
    turn_index: int
    end: TurnEvent | None

    @staticmethod
    def note(
        head: ResponseHead,
        before: Sequence[Json] | None,
        items: Sequence[Json],
        body: ResponsesBody,
        *,
        repeats: bool,
    ) -> bytes:
        """What the log keeps of it beside what its session has; see the attributes."""
        asked = body.model_dump(
            mode="json", by_alias=True, exclude={"input"}, exclude_unset=True, serialize_as_any=True
        )
        said = {"created_at": head.created_at, "before": before, "input": items, "body": asked}
        return json.dumps(said | ({"repeats": True} if repeats else {})).encode()

    @classmethod
    def of(cls, turn: TurnTranscript, session_id: str, model: ModelInfo) -> StoredResponse | None:
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
        said = json.loads(turn.said.note)
        return cls._noted(turn.said.key, said, model, session_id, turn.turn_index, whole)

    @classmethod
    def begun(cls, turn: TurnTranscript, said: Json, session_id: str, model: ModelInfo) -> StoredResponse:
        """`turn` says that it has begun: the next one is to be its own."""
        return cls._noted(said[_BEGUN], said, model, session_id, turn.turn_index + 1, None)

    @classmethod
    def _noted(
        cls,
        response_id: str,
        said: Json,
        model: ModelInfo,
        session_id: str,
        turn_index: int,
        end: TurnEvent | None,
    ) -> StoredResponse:
        body = ResponsesBody.model_validate(said["body"] | {"input": "-"}, strict=False)
        head = ResponseHead(response_id, model.model_id, body.repeated(model), said["created_at"])
        repeats = said.get("repeats", False)
        return cls(head, repeats, said["before"], said["input"], body, session_id, turn_index, end)

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
        reasoning = reads_thoughts(model, constraint_of(self.body.held(), tools.use))
        return ResponseReader(
            self.head,
            AnswerReader(calls_named_by(self.head.id), tools.use, reasoning),
            tools,
            encrypts_reasoning=self.body.encrypts_reasoning,
        )


async def note_begun(service: TurnService, turn: SessionTurn, tenant: str) -> SessionTurn:
    """Has the log say that the response of this turn has begun, in a turn before it. Gives the turn as it is to be run
    now. Raises ServiceError."""
    note = json.dumps({_BEGUN: turn.idempotency_key} | json.loads(turn.note)).encode()
    if turn.create:
        await service.open_session(turn.session_id, timeout_s=None, capacity_tokens=None, tenant=tenant)
    await service.keep_note(turn.session_id, note, expected_turn=turn.expected_turn, tenant=tenant)
    return replace(turn, create=False, expected_turn=(turn.expected_turn or 0) + 1)


async def note_ended(service: TurnService, stored: StoredResponse, end: TurnEvent, tenant: str) -> None:
    """Has the log say, in the place of its turn, how a response that had begun came to no end of its own.

    Raises ServiceError: (409, "turn_in_flight") while its turn runs, (409, "turn_differs") if it had an end.
    """
    note = json.dumps({_ENDED: stored.head.id, "turn": msgspec.to_builtins(end)}).encode()
    await service.keep_note(stored.session_id, note, expected_turn=stored.turn_index, tenant=tenant)


async def find_response(service: TurnService, response_id: str, tenant: str) -> StoredResponse:
    """Raises ServiceError (404)."""
    return (await found_response(service, response_id, tenant)).stored


async def input_items(service: TurnService, response_id: str, tenant: str) -> list[Json]:
    """All that its request sent. Raises ServiceError (404)."""
    turns, at, stored = await found_response(service, response_id, tenant)
    if not stored.repeats:
        return stored.input
    before = stored.before
    if before is None:
        before = said_until(turns[:at], service.model, response_id, "response_id")
    return [*before, *stored.input]


async def forget_response(service: TurnService, response_id: str, tenant: str) -> None:
    """Its session goes on without what it said; with its last response the session ends. Raises ServiceError (404)."""
    turns, _, stored = await found_response(service, response_id, tenant)
    noted = [turn for turn in turns if turn.said.note and turn.turn_index >= 0]
    its_own = [turn for turn in noted if response_of(turn) == response_id]
    if len(noted) == len(its_own):
        await service.close_session(stored.session_id, tenant=tenant)
        return
    for turn in its_own:
        await service.forget_note(stored.session_id, turn.turn_index, tenant=tenant)


class FoundResponse(NamedTuple):
    """The turns of a response's session, which of them is its own, and what it is."""

    turns: list[TurnTranscript]
    at: int
    stored: StoredResponse


async def found_response(
    service: TurnService, response_id: str, tenant: str, param: str = "response_id"
) -> FoundResponse:
    """`param` is the field that names it. Raises ServiceError (404)."""
    for session_id in sessions_of(response_id, param):
        try:
            turns = await service.transcript(session_id, tenant=tenant)
        except ServiceError as error:
            if error.info.code != SESSION_NOT_FOUND:
                raise
            continue
        found = _found_in(turns, session_id, response_id, service.model)
        if found is not None:
            return found
    raise _unknown(response_id, param)


def _found_in(
    turns: list[TurnTranscript], session_id: str, response_id: str, model: ModelInfo
) -> FoundResponse | None:
    unfinished: FoundResponse | None = None
    for at, turn in enumerate(turns):
        if turn.turn_index < 0 or response_of(turn) != response_id:
            continue
        stored = StoredResponse.of(turn, session_id, model)
        if stored is not None:
            return FoundResponse(turns, at, stored)
        said = json.loads(turn.said.note)
        if _BEGUN in said:
            unfinished = FoundResponse(turns, at, StoredResponse.begun(turn, said, session_id, model))
        elif unfinished is not None:
            end = msgspec.convert(said["turn"], TurnEvent)
            unfinished = unfinished._replace(stored=dataclasses.replace(unfinished.stored, end=end))
    return unfinished


def response_of(turn: TurnTranscript) -> str | None:
    """Of which response the turn is, or says that it has begun or ended."""
    if turn.said.key is not None or not turn.said.note:
        return turn.said.key if turn.said.note else None
    said = json.loads(turn.said.note)
    response_id: str | None = said.get(_BEGUN) or said.get(_ENDED)
    return response_id


def said_until(turns: Sequence[TurnTranscript], model: ModelInfo, response_id: str, param: str) -> list[Json]:
    """All items up to the end of the last of these turns, which `response_id` went on from. Raises ServiceError (404)
    where one was deleted."""
    items: list[Json] = []
    for turn in turns:
        if turn.asked_len == turn.start_len:  # It says nothing, but that a response has begun or ended.
            continue
        stored = StoredResponse.of(turn, "", model)
        if stored is None:
            raise refusal(
                f"{param}: something that {response_id!r} went on from was deleted.",
                param,
                status=404,
                code=NO_RESPONSE,
            )
        if stored.before is not None:
            items = list(stored.before)
        items += [*stored.input, *stored.response(model)["output"]]
    return items


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
