"""What new responses go on from: the response that they name, the one whose output their input repeats, or nothing.

One that goes on from the last response of a session is that session's next turn, if it has the same instructions and
tools; one that goes on from an earlier response is a turn of a fork. With other instructions or tools, or where another
turn is just being made behind the same response, it begins a session with all that was said.

Most clients send all that was said again with each request. They send our items with the ids that we gave them, and so
say which response was the last: its request is no new session then, and the log has what is new alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from serving.front.api.errors import refusal
from serving.front.api.responses.items import Json, canonical_items
from serving.front.api.responses.reasoning import thought
from serving.front.api.responses.replies import ResponseHead
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.store import (
    NO_RESPONSE,
    FoundResponse,
    StoredResponse,
    found_response,
    new_session_id,
    response_named,
    said_until,
    session_apart,
)
from serving.front.api.responses.tools import offered_tools
from serving.front.api.turn_streams import beside_streams
from serving.wire.turns import ModelInfo, ServiceError, SessionTurn, TurnService

_PREVIOUS = "previous_response_id"
_NOT_COMPARED: Json = {"id": None, "status": None}


@dataclass(frozen=True, slots=True)
class Continued:
    """What a new response goes on from. `items` is all that was said before, inputs and outputs; its request's input
    begins with `num_repeated` of them.

    `session_id` None: it is not stored. `end_len` is how many tokens the session that it goes on from has at that
    place: the session itself, as its turn number `next_turn`; or `fork_of`, of which a session with so many tokens is
    made. Else it begins a session. `has_more`: the items are more than its turns say.
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
        """Whether a turn that is made at the same time can be in its way."""
        return self.end_len > 0

    def apart(self, response_id: str) -> Continued:
        """The same in a session of the response's own, which begins with all that was said."""
        session_id = session_apart(response_id)
        return dataclasses.replace(self, session_id=session_id, fork_of=None, end_len=0, next_turn=0)

    async def make_fork(self, service: TurnService, tenant: str) -> None:
        """What the turn's session begins with, if it is a fork. Raises ServiceError."""
        if self.session_id is not None and self.fork_of is not None:
            await service.fork_session(
                self.fork_of, self.session_id, length=self.end_len, timeout_s=None, tenant=tenant
            )

    def turn(self, head: ResponseHead, items: Sequence[Json], body: ResponsesBody) -> SessionTurn | None:
        """The turn to be, with the new items. A fork is to be made before it runs."""
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
        )


async def continued(service: TurnService, body: ResponsesBody, tenant: str) -> Continued:
    """Raises ServiceError (404) for a response that is not there, or not all of what it went on from."""
    if body.previous_response_id is None:
        return await _repeated(service, body, tenant)
    previous = await found_response(service, body.previous_response_id, tenant, _PREVIOUS)
    if not previous.stored.is_completed:
        raise refusal(f"{_PREVIOUS}: only a response that has been completed can be gone on from.", _PREVIOUS)
    said = _said_in(previous, service.model)
    return await _behind(service, previous, tuple(said), body, tenant)


async def continued_with(
    service: TurnService, items: Sequence[Json], last_id: str | None, body: ResponsesBody, tenant: str
) -> Continued:
    """The same of all that was said in a conversation, whose last response was `last_id`: in the session of that, as
    long as the items begin with what that has."""
    anew = begun(body, items)
    if last_id is None:
        return anew
    found = await _completed(service, last_id, tenant)
    if found is None or list(items[: len(found.said)]) != found.said:
        return anew
    behind = await _behind(service, found.response, anew.items, body, tenant)
    return dataclasses.replace(behind, has_more=len(found.said) < len(items))


async def _repeated(service: TurnService, body: ResponsesBody, tenant: str) -> Continued:
    """What goes on from the response that the last of our items in the input is of, as long as the input begins with
    all that was said until the end of that."""
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
    """Whether a client's items say what ours do. Reasoning that says nothing itself is that of its id."""
    return all(_is_same(item, ours) for item, ours in zip(canonical_items(given, ""), said, strict=True))


def _is_same(item: Json, ours: Json) -> bool:
    if item["type"] == "reasoning" and item["id"] == ours["id"] and not thought(item):
        return True
    return item | _NOT_COMPARED == ours | _NOT_COMPARED


class _Completed(NamedTuple):
    """A completed response, and all that was said until its end."""

    response: FoundResponse
    said: list[Json]


async def _completed(service: TurnService, response_id: str, tenant: str) -> _Completed | None:
    """None: it is not there, or not all of what it went on from, or has not been completed. Raises ServiceError."""
    try:
        found = await found_response(service, response_id, tenant)
        return _Completed(found, _said_in(found, service.model)) if found.stored.is_completed else None
    except ServiceError as error:
        if error.info.code != NO_RESPONSE:
            raise
        return None


def _said_in(found: FoundResponse, model: ModelInfo) -> list[Json]:
    return said_until(found.turns[: found.at + 1], model, found.stored.head.id, _PREVIOUS)


async def _behind(
    service: TurnService, found: FoundResponse, items: tuple[Json, ...], body: ResponsesBody, tenant: str
) -> Continued:
    """What goes on from a response with all these items."""
    turns, at, previous = found
    anew = begun(body, items)
    if not body.is_stored or _beginning(previous.body, service.model) != _beginning(body, service.model):
        return anew
    session = await service.session(previous.session_id, tenant=tenant)
    if session is None or session.in_turn:
        return anew
    here = dataclasses.replace(anew, end_len=turns[at].end_len)
    if at == len(turns) - 1 and not turns[at].is_cut:
        return dataclasses.replace(here, session_id=previous.session_id, next_turn=session.turns)
    return dataclasses.replace(here, fork_of=previous.session_id)


def begun(body: ResponsesBody, items: Iterable[Json] = ()) -> Continued:
    """With a session of its own, if it is to be stored, and all that was said before."""
    return Continued(new_session_id() if body.is_stored else None, tuple(items))


def _beginning(body: ResponsesBody, model: ModelInfo) -> Any:
    """What a prompt begins with, and is rendered by: a session has the same all the time."""
    use = offered_tools(body.tools, body.tool_choice, body.parallel_tool_calls, model).use
    return body.instructions, body.template_kwargs, () if use is None else use.for_template()
