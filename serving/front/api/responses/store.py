"""Stored responses, which can be read again: turns of hidden sessions, in the session log.

A stored response is a turn of a session that its id names (continuations.py says of which session). So it survives what
a session survives, and is kept as long as its session.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import NAMESPACE_OID, uuid4, uuid5

import msgspec
from msgspec.structs import replace

from serving.front.api.answers.reader import AnswerReader, reads_thoughts
from serving.front.api.errors import refusal
from serving.front.api.hidden_sessions import HEX, RESPONSE
from serving.front.api.responses.items import Json
from serving.front.api.responses.replies import ResponseHead, ResponseReader
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.service import TurnService
from serving.wire.errors import SESSION_NOT_FOUND
from serving.wire.turns import (
    ModelInfo,
    ServiceError,
    SessionTurn,
    TurnEvent,
    TurnTranscript,
)

_ID = "resp_"
_NAME = re.compile(f"{_ID}({HEX})[0-9a-f]{{16}}")
"""Matches the id of a response; finds what follows the prefix in its session's name."""
NO_RESPONSE = "response_not_found"
_SCOPE = re.compile(r"[a-z]+_([0-9a-f]{48})o[0-9]+")
"""Matches the id of an answer's item; finds what follows the prefix in the response's id."""
_BEGUN = "begun"
_ENDED = "ended"
"""Fields in the note of a turn that says nothing: the id of the response that has begun, or ended."""


def new_response_id(session_id: str | None) -> str:
    """A new id for a response that is a turn of this session (None: of none)."""
    scope = uuid4().hex if session_id is None else session_id.removeprefix(RESPONSE)
    return f"{_ID}{scope}{uuid4().hex[:16]}"


def session_apart(response_id: str) -> str:
    """The session of a response whose turn could not be in the one that its id names: another turn came first."""
    return f"{RESPONSE}{uuid5(NAMESPACE_OID, response_id).hex}"


def sessions_of(response_id: str) -> tuple[str, str]:
    """The sessions that the response may be in; most are in the first. Raises ServiceError if this is not the id of a
    response."""
    named = _NAME.fullmatch(response_id)
    if named is None:
        raise _unknown(response_id)
    return f"{RESPONSE}{named[1]}", session_apart(response_id)


def response_named(item_id: str | None) -> str | None:
    """The response whose answer had an item of this id; None if the id was not made here."""
    named = _SCOPE.fullmatch(item_id or "")
    return None if named is None else f"{_ID}{named[1]}"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response in the session log. `body` is its request without the input. `input`: the items of the input; if it
    `repeats` everything that was said before, only the items after that. `before`: everything that was said before;
    None if the session's turns before it contain exactly that. `turn_index`: the number of its turn in the session.
    `end`: the whole turn as one event; None: it was begun in the background, and the log has no end of it."""

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
        """What the log keeps of a response beside what its session has; see the attributes."""
        said = {
            "created_at": head.created_at,
            "model": head.model_id,
            "tool_calls": head.tool_calls,
            "reasoning": head.reasoning,
            "before": before,
            "input": items,
            "body": body.asked(),
        }
        return json.dumps(said | ({"repeats": True} if repeats else {})).encode()

    @classmethod
    def of(cls, turn: TurnTranscript, session_id: str, model: ModelInfo) -> StoredResponse | None:
        """The response of a turn; None if no response is kept of it."""
        if not turn.said.note or turn.said.key is None:
            return None
        whole = TurnEvent(
            text=turn.said.answer,
            prompt_tokens=turn.asked_len,
            cached_tokens=turn.said.cached_tokens,
            completion_tokens=turn.said.num_output,
            finish=turn.said.finish,
            in_thought=turn.said.in_thought,
            ended_s=turn.said.ended_s,
        )
        said = json.loads(turn.said.note)
        return cls._noted(turn.said.key, said, model, session_id, turn.turn_index, whole)

    @classmethod
    def begun(cls, turn: TurnTranscript, said: Json, session_id: str, model: ModelInfo) -> StoredResponse:
        """A response that has no end yet. `turn` records that it has begun; the next turn is its own."""
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
        model_id = said.get("model", model.model_id)
        head = ResponseHead(
            response_id,
            model_id,
            body.repeated(model),
            # Notes of earlier versions lack these.
            said.get("tool_calls", model.tool_calls),
            said.get("reasoning", model.reasoning),
            said["created_at"],
        )
        repeats = said.get("repeats", False)
        return cls(head, repeats, said["before"], said["input"], body, session_id, turn_index, end)

    @property
    def is_completed(self) -> bool:
        """Whether its turn is part of its session, so that other responses can go on from it."""
        return self.end is not None and self.end.is_committed

    def response(self, model: ModelInfo) -> Json:
        """The response as its client got it. It must have ended."""
        assert self.end is not None
        reader = self.reader(model)
        if self.end.error is not None:
            reader.read(replace(self.end, error=None))
            return self.head.failed(self.end.error, reader.items)
        reader.read(self.end)
        response = reader.response(self.end)
        assert response is not None
        return response

    def made_by(self, model: ModelInfo) -> ModelInfo:
        """The model with the formats in which it wrote this response: the settings may have changed since, or the
        model."""
        return replace(model, tool_calls=self.head.tool_calls, reasoning=self.head.reasoning)

    def reader(self, model: ModelInfo) -> ResponseReader:
        """A reader for the events of its turn, from the first one on."""
        model = self.made_by(model)
        tools = self.body.offered_tools(model)
        reasoning = reads_thoughts(model, tools.use.constraint(self.body.held()))
        return ResponseReader(
            self.head,
            AnswerReader(self.head.id, tools.use, reasoning),
            tools,
            encrypts_reasoning=self.body.encrypts_reasoning,
        )


async def note_begun(service: TurnService, turn: SessionTurn, tenant: str) -> SessionTurn:
    """Records in the log that the response of this turn has begun, as a turn before it. Returns the turn as it must be
    run now. Raises ServiceError."""
    note = json.dumps({_BEGUN: turn.idempotency_key} | json.loads(turn.note)).encode()
    if turn.create:
        await service.open_session(turn.session_id, timeout_s=None, capacity_tokens=None, tenant=tenant)
    await service.keep_note(turn.session_id, note, expected_turn=turn.expected_turn, tenant=tenant)
    return replace(turn, create=False, expected_turn=(turn.expected_turn or 0) + 1, fallback=None)


async def note_ended(service: TurnService, stored: StoredResponse, end: TurnEvent, tenant: str) -> None:
    """Records in the log, in the place of its turn, the end of a response that had begun but has no committed turn.

    Raises ServiceError: (409, "turn_in_flight") while its turn runs, (409, "turn_differs") if it has an end already.
    """
    note = json.dumps({_ENDED: stored.head.id, "turn": msgspec.to_builtins(end)}).encode()
    await service.keep_note(stored.session_id, note, expected_turn=stored.turn_index, tenant=tenant)


async def find_response(service: TurnService, response_id: str, tenant: str) -> StoredResponse:
    """The response of this id. Raises ServiceError (404)."""
    return (await found_response(service, response_id, tenant)).stored


async def kept_response(service: TurnService, response_id: str, tenant: str) -> StoredResponse | None:
    """The response of this id; None if it was deleted, has expired or was never there. Raises ServiceError."""
    try:
        return await find_response(service, response_id, tenant)
    except ServiceError as error:
        if error.info.code != NO_RESPONSE:
            raise
        return None


async def input_items(service: TurnService, response_id: str, tenant: str) -> list[Json]:
    """All items that the response's request sent. Raises ServiceError (404)."""
    turns, at, stored = await found_response(service, response_id, tenant)
    if not stored.repeats:
        return stored.input
    before = stored.before
    if before is None:
        before = await said_until(turns[:at], service.model, response_id)
    return [*before, *stored.input]


async def forget_response(service: TurnService, response_id: str, tenant: str) -> None:
    """Deletes what the log keeps of the response. Its session goes on, but is closed with its last response. Raises
    ServiceError (404)."""
    turns, _, stored = await found_response(service, response_id, tenant)
    noted = [turn for turn in turns if turn.said.note and turn.turn_index >= 0]
    its_own = [turn for turn in noted if response_of(turn) == response_id]
    if len(noted) == len(its_own):
        await service.close_session(stored.session_id, tenant=tenant)
        return
    for turn in its_own:
        await service.forget_note(stored.session_id, turn.turn_index, tenant=tenant)


class FoundResponse(NamedTuple):
    """The turns of a response's session, the index of its own turn among them, and the response."""

    turns: list[TurnTranscript]
    at: int
    stored: StoredResponse


async def found_response(service: TurnService, response_id: str, tenant: str) -> FoundResponse:
    """Finds a response. Raises ServiceError (404)."""
    for session_id in sessions_of(response_id):
        try:
            turns = await service.transcript(session_id, tenant=tenant)
        except ServiceError as error:
            if error.info.code != SESSION_NOT_FOUND:
                raise
            continue
        found = _found_in(turns, session_id, response_id, service.model)
        if found is not None:
            return found
    raise _unknown(response_id)


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
    """The response that the turn belongs to: it is the response's turn, or records its beginning or its end."""
    if not turn.said.note:
        return None
    if turn.said.key is not None:
        return turn.said.key
    said = json.loads(turn.said.note)
    response_id: str | None = said.get(_BEGUN) or said.get(_ENDED)
    return response_id


async def said_until(turns: Sequence[TurnTranscript], model: ModelInfo, response_id: str) -> list[Json]:
    """All items up to the end of the last of these turns, which `response_id` went on from. Raises ServiceError (404)
    if one of them was deleted. Each turn takes up to a millisecond, so they are read on a thread."""
    return await asyncio.to_thread(_said_in, turns, model, response_id)


def _said_in(turns: Sequence[TurnTranscript], model: ModelInfo, response_id: str) -> list[Json]:
    items: list[Json] = []
    for turn in turns:
        if turn.asked_len == turn.start_len:  # It only records that a response has begun or ended.
            continue
        stored = StoredResponse.of(turn, "", model)
        if stored is None:
            raise refusal(
                f"response_id: something that {response_id!r} went on from was deleted.",
                "response_id",
                status=404,
                code=NO_RESPONSE,
            )
        if stored.before is not None:
            items = list(stored.before)
        items += [*stored.input, *stored.response(model)["output"]]
    return items


def _unknown(response_id: str) -> ServiceError:
    return refusal(
        f"response_id: no response {response_id[:120]!r}. Responses are kept until their session has been idle for its "
        "timeout.",
        "response_id",
        status=404,
        code=NO_RESPONSE,
    )
