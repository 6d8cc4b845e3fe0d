"""The numbered events of a streamed response."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from serving.front.api.responses.output import Event
from serving.front.api.responses.replies import ResponseHead, ResponseReader, completed_at_of, usage_of
from serving.front.api.sse import KEEP_ALIVE_COMMENT, typed_event
from serving.wire.turns import ErrorInfo, TurnEvent

NOTHING: Mapping[str, Any] = MappingProxyType({})
_LAST_EVENTS = MappingProxyType(
    {
        "completed": "response.completed",
        "incomplete": "response.incomplete",
        "cancelled": "response.incomplete",  # clients know no separate event for it
    }
)


class EventNumbers:
    """Gives the events of a stream their sequence numbers."""

    def __init__(self) -> None:
        self._next = 0

    def numbered(self, event: Event) -> Event | None:
        """The event with its number; None if it is left out."""
        self._next += 1
        return {**event, "sequence_number": self._next - 1}


class CharacterNumbers(EventNumbers):
    """The same, but each character of a delta has a number, and the delta has the number of its last character. So the
    numbers do not depend on how a text was cut, and any front end can continue the stream exactly after any of them.
    What has numbers up to `behind` is left out."""

    def __init__(self, behind: int | None = None) -> None:
        super().__init__()
        self._behind = -1 if behind is None else behind

    def numbered(self, event: Event) -> Event | None:
        delta = event.get("delta")
        first = self._next
        self._next += 1 if delta is None else len(delta)
        number = self._next - 1
        if number <= self._behind:
            return None
        rest = {} if delta is None else {"delta": delta[max(0, self._behind + 1 - first) :]}
        return {**event, **rest, "sequence_number": number}


class ResponseEvents:
    """The events of one response. The last one has the whole response. Each has the fields in `common`."""

    def __init__(
        self,
        head: ResponseHead,
        reader: ResponseReader,
        numbers: EventNumbers,
        common: Mapping[str, Any] = NOTHING,
    ) -> None:
        self._head = head
        self._reader = reader
        self._numbers = numbers
        self._common = common
        self._created = self._opened = False

    @property
    def begun(self) -> bool:
        return self._created

    def created(self) -> list[Event]:
        """The events before the turn says anything."""
        return self._told(self._creation())

    def of(self, event: TurnEvent) -> list[Event]:
        """The response's events for an event of the turn."""
        if event.says_nothing:
            return self.created()
        events = [*self._opening(), *self._reader.read(event)]
        response = self._reader.response(event)
        if response is not None:
            events.append({"type": _LAST_EVENTS[response["status"]], "response": response})
        return self._told(events)

    def prepared(self, event: TurnEvent) -> list[Event]:
        """The events, at the end of its turn, of a response that was to say nothing."""
        usage = usage_of(event) | {"output_tokens": 0, "total_tokens": event.prompt_tokens}
        response = self._head.response("completed", completed_at=completed_at_of(event), usage=usage)
        return self._told([*self._opening(), {"type": _LAST_EVENTS["completed"], "response": response}])

    def failed(self, info: ErrorInfo) -> list[Event]:
        response = self._head.failed(info, self._reader.items)
        return self._told([*self._opening(), {"type": "response.failed", "response": response}])

    def _creation(self) -> list[Event]:
        if self._created:
            return []
        self._created = True
        if not self._head.is_background:
            return [self._state("created", "in_progress")]
        return [self._state("created", "queued"), self._state("queued", "queued")]

    def _opening(self) -> list[Event]:
        if self._opened:
            return []
        self._opened = True
        return [*self._creation(), self._state("in_progress", "in_progress")]

    def _state(self, name: str, status: str) -> Event:
        return {"type": f"response.{name}", "response": self._head.response(status)}

    def _told(self, events: Iterable[Event]) -> list[Event]:
        numbered = map(self._numbers.numbered, events)
        return [{**event, **self._common} for event in numbered if event is not None]


class ResponseEncoder:
    """Writes the events of one response as server-sent events."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, head: ResponseHead, reader: ResponseReader, numbers: EventNumbers) -> None:
        self._events = ResponseEvents(head, reader, numbers)

    def accepted(self) -> bytes:
        return b"".join(map(typed_event, self._events.created()))

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        assert index == 0
        return b"".join(map(typed_event, self._events.of(event)))

    def closing(self) -> bytes:
        return b""

    def error(self, info: ErrorInfo) -> bytes:
        return b"".join(map(typed_event, self._events.failed(info)))
