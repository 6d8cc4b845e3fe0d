"""The events of a streamed response, numbered."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from serving.front.api.reply_json import encoded
from serving.front.api.responses_output import Event
from serving.front.api.responses_replies import ResponseHead, ResponseReader
from serving.front.api.sse import KEEP_ALIVE_COMMENT, server_event
from serving.wire.turns import ErrorInfo, TurnEvent

_LAST_EVENTS = MappingProxyType(
    {
        "completed": "response.completed",
        "incomplete": "response.incomplete",
        "cancelled": "response.incomplete",  # clients know no event of its own
    }
)


class ResponseEncoder:
    """Writes the events of one response. The last one has all of it; nothing follows."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, head: ResponseHead, reader: ResponseReader) -> None:
        self._head = head
        self._reader = reader
        self._num_events = 0

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        assert index == 0
        events = [*self._opening(), *self._reader.read(event)]
        response = self._reader.response(event)
        if response is not None:
            events.append({"type": _LAST_EVENTS[response["status"]], "response": response})
        return self._written(events)

    def closing(self) -> bytes:
        return b""

    def error(self, info: ErrorInfo) -> bytes:
        response = self._head.failed(info, self._reader.items)
        return self._written([*self._opening(), {"type": "response.failed", "response": response}])

    def _opening(self) -> list[Event]:
        if self._num_events:
            return []
        response = self._head.response("in_progress")
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._numbered, events))

    def _numbered(self, event: Event) -> bytes:
        numbered: dict[str, Any] = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return server_event(encoded(numbered), event["type"])
