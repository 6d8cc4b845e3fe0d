"""What new responses go on from: a response that they name, a response whose output their input repeats, or nothing.

A response that goes on from the last response of a session is the session's next turn, if it has the same instructions
and tools. If it goes on from an earlier response, it is a turn of a fork. If the instructions or tools differ, or
another turn is just being made after the same response, it begins a session with everything that was said.

Most clients send everything that was said again with each request. They send our items with the ids that we gave them,
which tell which response was the last. So such a request does not begin a session, and the log gets only what is new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from serving.front.api.errors import refusal
from serving.front.api.field_names import FieldNames
from serving.front.api.fields import new_id
from serving.front.api.hidden_sessions import RESPONSE
from serving.front.api.responses.history import item_of
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.reasoning import thought
from serving.front.api.responses.replies import ResponseHead
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.store import (
    NO_RESPONSE,
    FoundResponse,
    StoredResponse,
    found_response,
    response_named,
    said_until,
    session_apart,
)
from serving.front.api.service import TurnService
from serving.front.api.turn_streams import beside_streams
from serving.wire.turns import ModelInfo, ServiceError, SessionTurn

_PREVIOUS = "previous_response_id"
_NAMES = FieldNames({"response_id": _PREVIOUS})
"""What the body calls the response that it names."""
NOT_COMPARED: Json = {"id": None, "status": None}
"""The fields of an item that its client need not send as they were."""


@dataclass(frozen=True, slots=True)
class Continued:
    """What a new response goes on from. `items` is everything that was said before, inputs and outputs. The request's
    input begins with `num_repeated` of them.

    `session_id` is the response's session; None: it is not stored. `end_len`: how many tokens of an existing session it
    goes on from; 0 if it begins a session. With `fork_of` its session is a fork of that one, made at this length;
    otherwise the response is turn `next_turn` of its session. `has_more`: there are more items than the turns of the
    session contain.
    """

    session_id: str | None
    items: tuple[Json, ...] = ()
    num_repeated: int = 0
    fork_of: str | None = None
    end_len: int = 0
    next_turn: int = 0
    has_more: bool = False

    @property
    def begins_session(self) -> bool:
        """Whether the response is the first of its session."""
        return self.session_id is not None and self.next_turn == 0

    @property
    def needs_its_place(self) -> bool:
        """Whether another turn, made at the same time, can take its place."""
        return self.end_len > 0

    def name_of_message(self, body: ResponsesBody, said: Sequence[Json], index: int) -> str:
        """The part of the request that the prompt's message of this index comes from."""
        at = item_of(index, body.instructions, said)
        if at is None:
            return "instructions"
        if at >= len(self.items):
            at += self.num_repeated - len(self.items)
        elif at >= self.num_repeated:
            return "input"  # it was said before, and the request only refers to it
        return "input" if isinstance(body.input, str) else f"input[{at}]"

    def apart(self, response_id: str) -> Continued:
        """The same in a separate session, which begins with everything that was said."""
        session_id = session_apart(response_id)
        return dataclasses.replace(self, session_id=session_id, fork_of=None, end_len=0, next_turn=0)

    async def make_fork(self, service: TurnService, tenant: str) -> None:
        """Makes the turn's session, if that is a fork. Raises ServiceError."""
        if self.session_id is not None and self.fork_of is not None:
            await service.fork_session(
                self.fork_of, self.session_id, length=self.end_len, timeout_s=None, tenant=tenant
            )

    def turn(self, head: ResponseHead, items: Sequence[Json], body: ResponsesBody) -> SessionTurn | None:
        """The response's turn, with the new items; None if it is not stored. Call `make_fork` before it runs."""
        if self.session_id is None:
            return None
        begins = self.fork_of is None and self.next_turn == 0
        before = self.items if begins or self.has_more else None
        return SessionTurn(
            self.session_id,
            idempotency_key=head.id,
            create=begins,
            expected_turn=self.next_turn,
            mode="full",
            note=StoredResponse.note(head, before, items, body, repeats=self.num_repeated > 0),
            fallback="elsewhere" if self.needs_its_place else None,
        )


async def continued(service: TurnService, body: ResponsesBody, tenant: str) -> Continued:
    """What the response to this body goes on from. Raises ServiceError (404) if the response that it names does not
    exist, or something that one went on from."""
    if body.previous_response_id is None:
        return await _repeated(service, body, tenant)
    with _NAMES.in_errors():
        previous = await found_response(service, body.previous_response_id, tenant)
        if not previous.stored.is_completed:
            message = f"{_PREVIOUS}: only a response that has been completed can be gone on from."
            raise refusal(message, _PREVIOUS)
        said = await _said_in(previous, service.model)
    return await _behind(service, previous, tuple(said), body, tenant)


async def continued_with(
    service: TurnService, items: Sequence[Json], last_id: str | None, body: ResponsesBody, tenant: str
) -> Continued:
    """The same in a conversation in which `items` were said and `last_id` was the last response. Goes on in the session
    of that response, if the items begin with what that session has."""
    anew = begun(body, items)
    if last_id is None:
        return anew
    found = await _completed(service, last_id, tenant)
    if found is None or list(items[: len(found.said)]) != found.said:
        return anew
    behind = await _behind(service, found.response, anew.items, body, tenant)
    return dataclasses.replace(behind, has_more=len(found.said) < len(items))


async def _repeated(service: TurnService, body: ResponsesBody, tenant: str) -> Continued:
    """The same for a request that names no response. The last of our items in its input tells a response. The request
    goes on from that one, if the input begins with everything that was said up to its end."""
    anew = begun(body)
    last_id = _last_response(body)
    if last_id is None or not body.is_stored:
        return anew
    found = await _completed(service, last_id, tenant)
    given: list[Any] = list(body.input)
    if found is None or len(found.said) >= len(given):
        return anew
    compare = partial(_are_same, given[: len(found.said)], found.said)
    if not await beside_streams(compare, len(found.said)):
        return anew
    behind = await _behind(service, found.response, tuple(found.said), body, tenant)
    return dataclasses.replace(behind, num_repeated=len(found.said))


def _last_response(body: ResponsesBody) -> str | None:
    if isinstance(body.input, str):
        return None
    ids = (getattr(item, "id", None) for item in reversed(body.input))
    return next(filter(None, map(response_named, ids)), None)


def _are_same(given: list[Any], said: Sequence[Json]) -> bool:
    """Whether a client's items are the same as ours. Reasoning without text is the same if it has the same id."""
    return all(_is_same(item, ours) for item, ours in zip(canonical_items(given, ""), said, strict=True))


def _is_same(item: Json, ours: Json) -> bool:
    if item["type"] == "reasoning" and item["id"] == ours["id"] and not thought(item):
        return True
    return item | NOT_COMPARED == ours | NOT_COMPARED


class _Completed(NamedTuple):
    """A completed response, and everything that was said up to its end."""

    response: FoundResponse
    said: list[Json]


async def _completed(service: TurnService, response_id: str, tenant: str) -> _Completed | None:
    """None if the response, or something that it went on from, does not exist, or if it was not completed. Raises
    ServiceError."""
    try:
        found = await found_response(service, response_id, tenant)
        return _Completed(found, await _said_in(found, service.model)) if found.stored.is_completed else None
    except ServiceError as error:
        if error.info.code != NO_RESPONSE:
            raise
        return None


async def _said_in(found: FoundResponse, model: ModelInfo) -> list[Json]:
    return await said_until(found.turns[: found.at + 1], model, found.stored.head.id)


async def _behind(
    service: TurnService, found: FoundResponse, items: tuple[Json, ...], body: ResponsesBody, tenant: str
) -> Continued:
    """What a response goes on from that follows `found`, with all these items."""
    turns, at, previous = found
    anew = begun(body, items)
    began = _beginning(previous.body, previous.made_by(service.model))
    if not body.is_stored or began != _beginning(body, service.model):
        return anew
    session = await service.session(previous.session_id, tenant=tenant)
    if session is None:
        return anew
    here, next_turn = dataclasses.replace(anew, end_len=turns[at].end_len), turns[at].turn_index + 1
    # The session may have had another turn since `turns` were read, which this one must not cut off.
    if at == len(turns) - 1 and not turns[at].is_cut and session.turns == next_turn:
        return dataclasses.replace(here, session_id=previous.session_id, next_turn=next_turn)
    return dataclasses.replace(here, fork_of=previous.session_id)


def begun(body: ResponsesBody, items: Iterable[Json] = ()) -> Continued:
    """A response that begins a session, if it is stored; `items` were said before."""
    return Continued(new_id(RESPONSE) if body.is_stored else None, tuple(items))


def _beginning(body: ResponsesBody, model: ModelInfo) -> Any:
    """What a prompt begins with and is rendered with. Within a session it never changes."""
    return body.instructions, body.template_kwargs, body.offered_tools(model).use.for_template()
