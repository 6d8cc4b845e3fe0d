"""One lane of a WebSocket: its responses, and what a connection remembers of responses that are not stored."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from serving.front.api.affinity import AffinityKeys
from serving.front.api.errors import ClientGone, openai_error, retry_headers, said_of
from serving.front.api.ignored_fields import IGNORED_FIELDS, IgnoredFields
from serving.front.api.priorities import engine_priority
from serving.front.api.reply_json import reply_json
from serving.front.api.responses.continuations import begun
from serving.front.api.responses.items import Json
from serving.front.api.responses.output import Event, without_logprobs
from serving.front.api.responses.routes import AskedResponse, asked_response
from serving.front.api.responses.schema import ResponsesBody
from serving.front.api.responses.store import NO_RESPONSE
from serving.front.api.responses.stream import EventNumbers, ResponseEvents
from serving.front.api.rules import ApiRules
from serving.front.api.service import TurnService
from serving.front.api.sockets import Socket
from serving.front.api.strict_json import NotSupported, StrictBody, validated_body
from serving.front.api.turn_streams import open_turns
from serving.wire.turns import ErrorInfo, ServiceError

CREATE = "response.create"
_PREVIOUS = "previous_response_id"
_NOT_HERE = "previous_response_not_found"
"""The error code after which OpenAI's clients send the whole input, over a WebSocket."""

logger = logging.getLogger(__name__)


class Create(StrictBody):
    """The fields that a message has beside those of a request's body."""

    type: Literal["response.create"]
    stream_id: str | None = None
    generate: bool | None = None
    background: NotSupported = None


@dataclass(frozen=True, slots=True)
class Remembered:
    """Everything that was said up to the end of a response that is not stored."""

    response_id: str
    items: list[Json]
    size_bytes: int


class Memory:
    """What one connection remembers: each lane's newest response, unless that is stored. If all of them have more than
    `most_bytes`, the oldest are dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._newest: dict[str | None, Remembered] = {}
        """By lane, the most recently noted last."""

    def find(self, response_id: str | None) -> Remembered | None:
        return next((said for said in self._newest.values() if said.response_id == response_id), None)

    def note(self, lane: str | None, said: Remembered | None) -> None:
        """Notes the lane's newest response; None: it is stored."""
        self._newest.pop(lane, None)
        if said is None:
            return
        self._newest[lane] = said
        while sum(each.size_bytes for each in self._newest.values()) > self._most_bytes:
            del self._newest[next(iter(self._newest))]


class Lane:
    """One lane. All lanes of a connection share `memory`: a response may go on from another lane's response. `affinity`
    is that of the connection."""

    def __init__(
        self,
        stream_id: str | None,
        socket: Socket,
        service: TurnService,
        tenant: str,
        memory: Memory,
        affinity: AffinityKeys,
        rules: ApiRules,
    ) -> None:
        self._name = stream_id
        self._common: Json = {} if stream_id is None else {"stream_id": stream_id}
        self._socket = socket
        self._service = service
        self._tenant = tenant
        self._memory = memory
        self._affinity = affinity
        self._rules = rules

    async def answer(self, value: Json, size_bytes: int, *, is_small: bool) -> None:
        """Makes the response that a message asks for, and sends its events. Raises errors that come before the first
        event."""
        envelope = {name: value[name] for name in Create.model_fields if name in value}
        create = await validated_body(Create, envelope, None, is_small=True)
        fields = {name: each for name, each in value.items() if name not in Create.model_fields}
        ignored = IgnoredFields() if self._rules.ignore_unknown_fields else None
        body = await validated_body(ResponsesBody, fields, ignored, is_small=is_small)
        if create.generate is False:
            body = body.model_copy(update={"store": False, "max_output_tokens": 1})
        before = self._memory.find(body.previous_response_id)
        priority = engine_priority(self._rules.request_priority, lower_first=body.priority)
        continued = None if before is None else begun(body, before.items)
        asked = await asked_response(body, self._service, self._tenant, priority, self._affinity, continued)
        opening = {IGNORED_FIELDS: ignored.header} if ignored else {}
        last = await self._tell_turn(asked, opening, generates=create.generate is not False)
        if last is None:
            return
        response, response_bytes = last
        size_bytes += response_bytes + (0 if before is None else before.size_bytes)
        output = map(without_logprobs, response["output"])
        said = Remembered(asked.head.id, [*asked.items, *output], size_bytes)
        self._memory.note(self._name, None if body.is_stored else said)

    async def refuse(self, error: Exception) -> None:
        """Tells the client what is wrong with its message. If `error` is ClientGone, raises it."""
        if isinstance(error, ClientGone):
            raise error
        info = said_of(error)
        if info.status >= 500 and not isinstance(error, ServiceError):
            logger.error("a message over a WebSocket failed", exc_info=error)
        await self._socket.send(error_event(info, self._common))

    async def _tell_turn(
        self, asked: AskedResponse, opening: Json, *, generates: bool
    ) -> tuple[Json, int] | None:
        """Runs the turn and sends its events; the first one also has the fields in `opening`. Returns the final
        response and the size of its last event in bytes; None: there is no response to go on from."""
        events = ResponseEvents(asked.head, asked.reader, EventNumbers(), self._common)
        response: Json | None = None
        size_bytes = 0
        try:
            async with open_turns(asked.turns, asked.plan) as turn:
                async for _, event in turn:
                    if not generates and event.finish is None:
                        continue
                    told = events.of(event) if generates else events.prepared(event)
                    if opening and told:
                        told[0] |= opening
                        opening = {}
                    size_bytes = await self._tell(told)
                    if event.finish is not None:
                        response = told[-1]["response"]
        except ClientGone:
            raise
        except Exception as error:
            if not events.begun:
                raise
            if not isinstance(error, ServiceError):
                logger.exception("a response over a WebSocket broke off")
            await self._tell(events.failed(said_of(error)))
            return None
        assert response is not None, "its turn has ended"
        return (response, size_bytes) if response["status"] != "cancelled" else None

    async def _tell(self, events: Iterable[Event]) -> int:
        """Sends the events. Returns the size of the last one in bytes."""
        size_bytes = 0
        for event in events:
            text = reply_json(event)
            await self._socket.send(text)
            size_bytes = len(text)
        return size_bytes


def error_event(info: ErrorInfo, common: Json | None = None) -> bytes:
    """A message that says what is wrong with one of the client's messages."""
    if (info.code, info.param) == (NO_RESPONSE, _PREVIOUS):
        info = msgspec.structs.replace(info, status=400, code=_NOT_HERE)
    error = openai_error(info)["error"]
    headers = retry_headers(info)
    if headers:
        error["headers"] = headers
    return reply_json({"type": "error", "status": info.status, "error": error, **(common or {})})
