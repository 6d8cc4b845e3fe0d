"""The events of a streamed response, numbered."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from serving.front.api.recorded_turns import NOTHING_YET
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


class EventNumbers:
    """Sequence numbers of a stream's events, of which those up to `behind` are left out."""

    def __init__(self, behind: int | None = None) -> None:
        self._next = 0
        self._behind = -1 if behind is None else behind

    def numbered(self, event: Event) -> Event | None:
        """None: it is left out."""
        number = self._next
        self._next += 1
        return {**event, "sequence_number": number} if number > self._behind else None


class CharacterNumbers(EventNumbers):
    """The same where each character that is told has a number, and a delta the one of its last. So the numbers do not
    depend on how a text was cut, and the stream goes on exactly behind any of them, whoever tells the rest."""

    def numbered(self, event: Event) -> Event | None:
        delta = event.get("delta")
        first = self._next
        self._next += 1 if delta is None else len(delta)
        number = self._next - 1
        if number <= self._behind:
            return None
        rest = {} if delta is None else {"delta": delta[max(0, self._behind + 1 - first) :]}
        return {**event, **rest, "sequence_number": number}


class ResponseEncoder:
    """Writes the events of one response. The last one has all of it; nothing follows."""

    keep_alive = KEEP_ALIVE_COMMENT

    def __init__(self, head: ResponseHead, reader: ResponseReader, numbers: EventNumbers) -> None:
        self._head = head
        self._reader = reader
        self._numbers = numbers
        self._opened = False
        self._begun = False

    async def chunk(self, index: int, event: TurnEvent) -> bytes:
        assert index == 0
        if event == NOTHING_YET:
            return self._written(self._created())
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

    def _created(self) -> list[Event]:
        """What is told before the turn says anything."""
        if self._opened:
            return []
        self._opened = True
        if not self._head.is_background:
            return [self._state("created", "in_progress")]
        return [self._state("created", "queued"), self._state("queued", "queued")]

    def _opening(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        return [*self._created(), self._state("in_progress", "in_progress")]

    def _state(self, name: str, status: str) -> Event:
        return {"type": f"response.{name}", "response": self._head.response(status)}

    def _written(self, events: Iterable[Event]) -> bytes:
        numbered = filter(None, map(self._numbers.numbered, events))
        return b"".join(server_event(encoded(event), event["type"]) for event in numbered)
