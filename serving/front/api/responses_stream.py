"""The events of a streamed response, numbered."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from serving.front.api.reply_json import encoded
from serving.front.api.responses_output import Event
from serving.front.api.responses_replies import ResponseHead, ResponseReader, usage_of
from serving.front.api.sse import KEEP_ALIVE_COMMENT, server_event
from serving.wire.turns import ErrorInfo, TurnEvent

NOTHING: Mapping[str, Any] = MappingProxyType({})
_LAST_EVENTS = MappingProxyType(
    {
        "completed": "response.completed",
        "incomplete": "response.incomplete",
        "cancelled": "response.incomplete",  # clients know no event of its own
    }
)


class ResponseEvents:
    """The events of one response. The last one has all of it; nothing follows. `common` is in each."""

    def __init__(
        self, head: ResponseHead, reader: ResponseReader, common: Mapping[str, Any] = NOTHING
    ) -> None:
        self._head = head
        self._reader = reader
        self._common = common
        self._num_events = 0

    @property
    def begun(self) -> bool:
        return self._num_events > 0

    def of(self, event: TurnEvent) -> list[Event]:
        """What an event of the turn adds."""
        events = [*self._opening(), *self._reader.read(event)]
        response = self._reader.response(event)
        if response is not None:
            events.append({"type": _LAST_EVENTS[response["status"]], "response": response})
        return list(map(self._numbered, events))

    def prepared(self, event: TurnEvent) -> list[Event]:
        """Of a response that was to say nothing, at the end of its turn."""
        usage = usage_of(event) | {"output_tokens": 0, "total_tokens": event.prompt_tokens}
        response = self._head.response("completed", completed_at=int(time.time()), usage=usage)
        events = [*self._opening(), {"type": _LAST_EVENTS["completed"], "response": response}]
        return list(map(self._numbered, events))

    def failed(self, info: ErrorInfo) -> list[Event]:
        response = self._head.failed(info, self._reader.items)
        events = [*self._opening(), {"type": "response.failed", "response": response}]
        return list(map(self._numbered, events))

    def _opening(self) -> list[Event]:
        if self.begun:
            return []
        response = self._head.response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _numbered(self, event: Event) -> Event:
        numbered = {**event, "sequence_number": self._num_events, **self._common}
        self._num_events += 1
        return numbered


class ResponseEncoder:
    """Writes the events of one response as server-sent events."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, head: ResponseHead, reader: ResponseReader) -> None:
        self._events = ResponseEvents(head, reader)

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        assert index == 0
        return _written(self._events.of(event))

    def closing(self) -> bytes:
        return b""

    def error(self, info: ErrorInfo) -> bytes:
        return _written(self._events.failed(info))


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(server_event(encoded(event), event["type"]) for event in events)
