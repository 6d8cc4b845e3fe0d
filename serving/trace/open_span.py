"""A span that has begun, kept as plain data until it ends. The SDK's own takes a lock and checks every value."""

from __future__ import annotations

import time
import traceback
from contextvars import Token
from types import TracebackType
from typing import Protocol

from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.trace import Event
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

ERROR_TYPE = "error.type"
UNSET = Status(StatusCode.UNSET)


class Sender(Protocol):
    """Sends spans that have ended."""

    def ended(self, span: OpenSpan, end_ns: int) -> None: ...


class OpenSpan:
    """Owned by whoever began it, on one event loop. Children and callees know it by `name`."""

    __slots__ = ("_sender", "attributes", "events", "kind", "name", "parent", "start_ns", "status", "title")

    def __init__(
        self,
        sender: Sender,
        title: str,
        name: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, AttributeValue],
    ) -> None:
        self._sender = sender
        self.title = title
        self.name = name
        self.parent = parent
        self.kind = kind
        self.attributes = attributes
        self.events: list[Event] = []
        self.status = UNSET
        self.start_ns = time.time_ns()

    def event(self, name: str, attributes: dict[str, AttributeValue]) -> None:
        self.events.append(Event(name, attributes, time.time_ns()))

    def fail(self, kind: str, message: str | None = None) -> None:
        """Marks the span as one of a failed operation."""
        self.attributes[ERROR_TYPE] = kind
        self.status = Status(StatusCode.ERROR, message)

    def raised(self, error: Exception) -> None:
        """Records that the operation ended with an unexpected exception."""
        kind = type(error)
        named = (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
        self.event(
            "exception",
            {
                "exception.type": named,
                "exception.message": str(error),
                "exception.stacktrace": "".join(traceback.format_exception(error)),
                "exception.escaped": "False",
            },
        )
        self.status = Status(StatusCode.ERROR, f"{kind.__name__}: {error}")

    def end(self) -> None:
        self._sender.ended(self, time.time_ns())


class RequestNow(NonRecordingSpan):
    """The current span of a request. `start_ns` is when it began, or None if its trace is not kept."""

    def __init__(self, name: SpanContext, start_ns: int | None) -> None:
        super().__init__(name)
        self.start_ns = start_ns


class Current:
    """A context in which the span is the parent of every span that begins, including Ray's."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: NonRecordingSpan) -> None:
        self._span = span

    def __enter__(self) -> None:
        self._token: Token[Context] = attach(set_span_in_context(self._span))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        detach(self._token)


class Within(Current):
    """The same for an open span, which ends with the context."""

    __slots__ = ("_open",)

    def __init__(self, span: OpenSpan) -> None:
        super().__init__(NonRecordingSpan(span.name))
        self._open = span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, where)
        if isinstance(error, Exception):
            self._open.raised(error)
        self._open.end()
