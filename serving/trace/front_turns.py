"""The spans of turns at a front end: the whole turn, the search for a replica, and each attempt there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Span, SpanKind, get_current_span, set_span_in_context

from serving.logs.call_facts import CALL_FACTS
from serving.trace.gen_ai import (
    FIRST_CHUNK,
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    input_messages,
    operation_of,
    output_messages,
    request_attributes,
    usage_attributes,
)
from serving.trace.spans import TRACEPARENT, TRACESTATE, Spans, fail
from serving.wire.errors import SESSION_MOVED, STALE_EPOCH
from serving.wire.turns import ServiceError, TurnCall, TurnEvent

_MOVED = frozenset({SESSION_MOVED, STALE_EPOCH})
"""Nothing is wrong but who was asked."""
_LEFT = (asyncio.CancelledError, GeneratorExit)


class FrontTurns:
    """Implements FrontTraces (turn_traces.py)."""

    def __init__(self, spans: Spans, model: str) -> None:
        self._spans = spans
        self._model = model

    def turn(self, call: TurnCall) -> FrontTurn:
        self._parsed()
        span = self._spans.tracer.start_span(
            f"{operation_of(call)} {self._model}", attributes=request_attributes(call, self._model)
        )
        if self._spans.records_content:
            span.set_attribute(INPUT_MESSAGES, input_messages(call))
        return FrontTurn(self._spans, span)

    def _parsed(self) -> None:
        """From a request's arrival to its first turn: reading, checking, recognizing."""
        request, facts = get_current_span(), CALL_FACTS.get()
        if isinstance(request, ReadableSpan) and facts is not None and facts.turns == 1:
            self._spans.tracer.start_span("parse", start_time=request.start_time).end()


class FrontTurn:
    """Implements FrontTrace. Used on the front end's event loop."""

    def __init__(self, spans: Spans, span: Span) -> None:
        self._spans = spans
        self._span = span
        self._context = set_span_in_context(span)
        self._attempt = span
        self._began_s = time.perf_counter()
        self._heard = False
        self._text: list[str] = []

    def __enter__(self) -> FrontTurn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        if isinstance(error, ServiceError):
            fail(self._span, error.info.code, error.info.message)
        elif isinstance(error, _LEFT):
            self._span.set_attribute("kedge.client_left", True)
        elif kind is not None:
            fail(self._span, kind.__name__)
        self._span.end()

    @contextmanager
    def placing(self) -> Iterator[None]:
        with self._spans.tracer.start_as_current_span("place", context=self._context):
            yield

    @contextmanager
    def at(self, replica_id: str, epoch: int | None) -> Iterator[None]:
        attempt = self._attempt = self._spans.tracer.start_span(
            "dispatch",
            context=self._context,
            kind=SpanKind.CLIENT,
            attributes={"kedge.replica_id": replica_id},
        )
        if epoch is not None:
            attempt.set_attribute("kedge.epoch", epoch)
        try:
            yield
        finally:
            attempt.end()

    def carried(self, call: TurnCall) -> TurnCall:
        headers = self._spans.headers_of(self._attempt)
        return replace(call, traceparent=headers.get(TRACEPARENT, ""), tracestate=headers.get(TRACESTATE, ""))

    def ended_there(self, reason: str) -> None:
        if reason in _MOVED:
            self._attempt.set_attribute("kedge.moved", True)
        else:
            fail(self._attempt, reason)

    def failed_over(self, reason: str) -> None:
        self._span.add_event("failover", {"reason": reason})

    def taken_over(self, replica_id: str) -> None:
        self._span.add_event("takeover", {"kedge.replica_id": replica_id})

    def tell(self, event: TurnEvent) -> None:
        if not self._heard and not event.says_nothing:
            self._heard = True
            self._span.set_attribute(FIRST_CHUNK, time.perf_counter() - self._began_s)
        if self._spans.records_content:
            self._text.append(event.text)
        if event.error is not None:
            fail(self._span, event.error.code, event.error.message)
        if event.finish is not None:
            self._span.set_attributes(usage_attributes(event))
            if self._spans.records_content:
                self._span.set_attribute(OUTPUT_MESSAGES, output_messages("".join(self._text), event))
