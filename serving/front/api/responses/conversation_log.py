"""Conversations of OpenAI's API, in the session log.

A conversation is a session, which the conversation's id names. Its turns say nothing to a model: their notes record the
changes of the conversation. Its responses are turns of hidden sessions like all others (store.py). So each may have its
own instructions and tools, and items may be taken out of the middle. A response is named in the conversation before it
is made. It is part of the conversation once its own turn is committed; that takes no other commit. The next change of
the conversation writes down what such responses said: from then on the conversation does not need their sessions.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from serving.front.api.body_limits import MIB, MOST_BYTES
from serving.front.api.errors import refusal
from serving.front.api.field_names import FieldNames
from serving.front.api.hidden_sessions import CONVERSATION, HEX
from serving.front.api.responses.continuations import Continued, begun, continued, continued_with
from serving.front.api.responses.items import Json
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.store import (
    kept_response,
    new_response_id,
    sessions_of,
)
from serving.front.api.service import TurnService
from serving.wire.errors import ANOTHERS_TURN, SESSION_NOT_FOUND
from serving.wire.turns import ServiceError, TurnTranscript

_ID = "conv_"
_NAME = re.compile(f"{_ID}({HEX})")
"""Matches the id of a conversation; finds what follows the prefix in its session's name."""
TRIES = 20
PAUSE_S = 0.05
"""Between tries, when several changes come at the same time."""
GIVEN_UP_AFTER_S = 600.0
"""If by then a response has neither a turn in flight nor a committed one, it came to nothing."""
MOST_NOTES_BYTES = MOST_BYTES
"""A conversation whose notes have so many bytes takes nothing more. Each call reads all of them, and no context has
room for them. Limits of tokens do not bound them, since a conversation's turns have no tokens."""
_ADDED = frozenset({"items", "response"})
"""The changes that add something to a conversation, see `change_conversation`."""
_NO_CONVERSATION = "conversation_not_found"
NAMES_OF_RESPONSES = FieldNames({"conversation_id": "conversation"})
"""What the body of a response calls the conversation that it names."""


@dataclass(slots=True)
class _Entry:
    """Items that were added together, by a client or by a response. None: what the response said is not known yet."""

    items: list[Json] | None
    response_id: str | None = None
    begun_s: float = 0.0


@dataclass(slots=True)
class Conversation:
    """A conversation after the first `num_turns` turns of its session, whose notes have `notes_bytes`. `learned`: items
    of responses, by response id, that these do not have yet."""

    id: str
    created_at: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    num_turns: int = 0
    notes_bytes: int = 0
    learned: dict[str, list[Json]] = field(default_factory=dict)
    entries: list[_Entry] = field(default_factory=list)

    @property
    def items(self) -> list[Json]:
        """Everything that is known to have been said, in order."""
        return [item for entry in self.entries for item in entry.items or ()]

    @property
    def last_response_id(self) -> str | None:
        """The last response that said something."""
        said = [entry.response_id for entry in self.entries if entry.response_id is not None and entry.items]
        return said[-1] if said else None

    def shown(self) -> Json:
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
        }

    def take(self, changes: Iterable[Json]) -> None:
        """Applies the next of its notes, see `change_conversation`."""
        unknown = {entry.response_id: entry for entry in self.unknown()}
        for change in changes:
            self._take(change, unknown)
        self.entries = [entry for entry in self.entries if entry.items != []]

    def unknown(self) -> list[_Entry]:
        """Entries of responses whose items are not known yet."""
        return [entry for entry in self.entries if entry.items is None]

    def _take(self, change: Json, unknown: dict[str | None, _Entry]) -> None:
        """`unknown`: the entries of responses whose items are not known yet, by response id."""
        self.created_at = change.get("created_at", self.created_at)
        self.metadata = change.get("metadata", self.metadata)
        for response_id, items in change.get("learned", {}).items():
            if (entry := unknown.pop(response_id, None)) is not None:
                entry.items = items
        if "items" in change:
            self.entries.append(_Entry(change["items"]))
        if "response" in change:
            entry = _Entry(None, change["response"], change["begun_s"])
            self.entries.append(entry)
            unknown[entry.response_id] = entry
        if "deleted" in change:
            for entry in self.entries:
                if entry.items is not None:
                    entry.items = [item for item in entry.items if item["id"] != change["deleted"]]


async def open_conversation(
    service: TurnService, items: Sequence[Json], metadata: Mapping[str, str], tenant: str
) -> Conversation:
    """Makes a conversation that begins with these items, which have different ids. Raises ServiceError."""
    scope = uuid4().hex
    conversation = Conversation(f"{_ID}{scope}")
    change = {"created_at": int(time.time()), "metadata": metadata, "items": items}
    session_id = f"{CONVERSATION}{scope}"
    await service.open_session(session_id, timeout_s=None, capacity_tokens=None, tenant=tenant)
    await service.keep_note(session_id, json.dumps(change).encode(), expected_turn=0, tenant=tenant)
    conversation.take([change])
    return conversation


async def read_conversation(service: TurnService, conversation_id: str, tenant: str) -> Conversation:
    """The conversation as it is now. Raises ServiceError (404)."""
    turns = await _changes_of(service, conversation_id, tenant)
    conversation = Conversation(
        conversation_id,
        num_turns=turns[-1].turn_index + 1,
        notes_bytes=sum(len(turn.said.note) for turn in turns),
    )
    # A long conversation takes long: other tasks go on meanwhile.
    await asyncio.to_thread(conversation.take, (json.loads(turn.said.note) for turn in turns))
    entries = conversation.unknown()
    for entry, items in zip(
        entries, await asyncio.gather(*(_said_in(service, each, tenant) for each in entries)), strict=True
    ):
        if items is not None:
            assert entry.response_id is not None
            conversation.learned[entry.response_id] = items
    conversation.take([{"learned": conversation.learned}])
    return conversation


async def change_conversation(
    service: TurnService,
    conversation_id: str,
    tenant: str,
    change_of: Callable[[Conversation], Awaitable[Json]],
) -> Conversation:
    """Changes the conversation and returns it. `change_of` gets it as it is and returns the change: `items` to add, the
    id of the item that is `deleted`, new `metadata`, or a `response` that begins. If another change comes first, it is
    called again. Raises ServiceError, and what `change_of` raises."""
    for _ in range(TRIES):
        conversation = await read_conversation(service, conversation_id, tenant)
        change = await change_of(conversation)
        if not change and not conversation.learned:
            return conversation
        note = json.dumps(change | {"learned": conversation.learned}).encode()
        if change.keys() & _ADDED and conversation.notes_bytes + len(note) > MOST_NOTES_BYTES:
            most = f"{MOST_NOTES_BYTES // MIB} MiB"
            raise refusal(
                f"conversation_id: conversation {conversation_id!r} is full, {most}. Begin another.",
                "conversation_id",
            )
        try:
            await service.keep_note(
                _session_of(conversation_id), note, expected_turn=conversation.num_turns, tenant=tenant
            )
        except ServiceError as error:
            if error.info.code not in ANOTHERS_TURN:
                raise
            await asyncio.sleep(PAUSE_S)
        else:
            conversation.take([change])
            return conversation
    raise refusal(
        f"conversation_id: others change conversation {conversation_id!r} all the time.",
        "conversation_id",
        status=409,
        code="conversation_locked",
    )


async def begin_response(service: TurnService, body: ResponsesBody, tenant: str) -> tuple[Continued, str]:
    """What a new response goes on from, and its id. If the body names a conversation, the response is added to it.
    Raises ServiceError."""
    if body.conversation_id is None:
        before = await continued(service, body, tenant)
        return before, new_response_id(before.session_id)
    begun_last: list[tuple[Continued, str]] = []

    async def named(conversation: Conversation) -> Json:
        if not (conversation.items or body.input):
            raise refusal("input: nothing has been said yet in the conversation.", "input")
        check_item_ids(conversation.items, () if isinstance(body.input, str) else body.input, "input")
        last_id = conversation.last_response_id
        before = await continued_with(service, conversation.items, last_id, body, tenant)
        response_id = new_response_id(before.session_id)
        begun_last[:] = [(before, response_id)]
        return {"response": response_id, "begun_s": time.time()}

    with NAMES_OF_RESPONSES.in_errors():
        await change_conversation(service, body.conversation_id, tenant, named)
    return begun_last[0]


async def goes_on_from(service: TurnService, body: ResponsesBody, tenant: str) -> Continued:
    """What a response to this body would go on from; its whole input counts as new. Changes nothing. Raises
    ServiceError."""
    if body.conversation_id is not None:
        with NAMES_OF_RESPONSES.in_errors():
            conversation = await read_conversation(service, body.conversation_id, tenant)
        return begun(body, conversation.items)
    return begun(body) if body.previous_response_id is None else await continued(service, body, tenant)


async def keep_items(service: TurnService, conversation_id: str, tenant: str) -> None:
    """Writes what the conversation's responses said into its own notes, if it still exists."""

    async def nothing(_conversation: Conversation) -> Json:
        return {}

    try:
        await change_conversation(service, conversation_id, tenant, nothing)
    except ServiceError as error:
        if error.info.code != _NO_CONVERSATION:
            raise


def check_item_ids(known: Iterable[Json], given: Iterable[Any], param: str) -> None:
    """Refuses items of clients whose ids the conversation has: an id names one item, and pages of items go on after the
    one that a client names. `known`: the conversation's items. `param` is the field of the new ones."""
    ids = {item["id"] for item in known}
    for index, item in enumerate(given):
        if item.id is not None and item.id in ids:
            field = f"{param}[{index}].id"
            raise refusal(f"{field}: the conversation has an item {item.id[:120]!r} already.", field)
        ids.add(item.id)


async def close_conversation(service: TurnService, conversation_id: str, tenant: str) -> None:
    """Deletes the conversation; its responses stay. Raises ServiceError (404)."""
    await _changes_of(service, conversation_id, tenant)
    if not await service.close_session(_session_of(conversation_id), tenant=tenant):
        raise _not_there(conversation_id)


async def _changes_of(service: TurnService, conversation_id: str, tenant: str) -> list[TurnTranscript]:
    """The turns of the conversation's session. Raises ServiceError (404) if that is no conversation."""
    try:
        turns = await service.transcript(_session_of(conversation_id), tenant=tenant)
    except ServiceError as error:
        if error.info.code != SESSION_NOT_FOUND:
            raise
        turns = []
    if not turns or not all(turn.said.note for turn in turns):
        raise _not_there(conversation_id)
    return turns


async def _said_in(service: TurnService, entry: _Entry, tenant: str) -> list[Json] | None:
    """The items of a response, input and output; empty if it came to nothing. None: it is not known yet."""
    assert entry.response_id is not None
    stored = await kept_response(service, entry.response_id, tenant)
    if stored is None:
        return None if await _may_come(service, entry, tenant) else []
    if stored.end is None:
        return None
    return [*stored.input, *stored.response(service.model)["output"]] if stored.is_completed else []


async def _may_come(service: TurnService, entry: _Entry, tenant: str) -> bool:
    if time.time() - entry.begun_s < GIVEN_UP_AFTER_S:
        return True
    for session_id in sessions_of(entry.response_id or ""):
        session = await service.session(session_id, tenant=tenant)
        if session is not None and session.in_turn:
            return True
    return False


def _session_of(conversation_id: str) -> str:
    named = _NAME.fullmatch(conversation_id)
    if named is None:
        raise _not_there(conversation_id)
    return f"{CONVERSATION}{named[1]}"


def _not_there(conversation_id: str) -> ServiceError:
    return refusal(
        f"conversation_id: no conversation {conversation_id[:120]!r}. Conversations are kept until they have been idle "
        "for the timeout of sessions.",
        "conversation_id",
        status=404,
        code=_NO_CONVERSATION,
    )


def item_of(conversation: Conversation, item_id: str) -> Json:
    """The item of this id. Raises ServiceError (404)."""
    found: Any = next((item for item in conversation.items if item["id"] == item_id), None)
    if found is None:
        raise refusal(f"item_id: no item {item_id[:120]!r}.", "item_id", status=404, code="item_not_found")
    shown: Json = found
    return shown
