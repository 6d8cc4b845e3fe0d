"""The spans of turns at a front end: the whole turn, the search for a replica, and each attempt there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from msgspec.structs import replace
from opentelemetry.context import get_current
from opentelemetry.trace import SpanContext, SpanKind, get_current_span

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
from serving.trace.open_span import OpenSpan, RequestNow, Within
from serving.trace.spans import TRACEPARENT, TRACESTATE, Spans, headers_of, is_kept
from serving.trace.turn_traces import FrontTrace, Untraced
from serving.wire.errors import SESSION_MOVED, STALE_EPOCH
from serving.wire.turns import ServiceError, TurnCall, TurnEvent

_MOVED = frozenset({SESSION_MOVED, STALE_EPOCH})
"""Errors that only mean that the wrong replica was asked."""
_LEFT = (asyncio.CancelledError, GeneratorExit)


class FrontTurns:
    """Implements FrontTraces (turn_traces.py)."""

    def __init__(self, spans: Spans, model: str) -> None:
        self._spans = spans
        self._model = model

    def turn(self, call: TurnCall) -> FrontTrace:
        request = get_current_span()
        name, parent = self._spans.named_in(get_current())
        if not is_kept(name):
            return UnkeptFrontTurn(name)
        if isinstance(request, RequestNow):
            self._parsed(request)
        attributes = request_attributes(call, self._model)
        if self._spans.records_content:
            attributes[INPUT_MESSAGES] = input_messages(call)
        title = f"{operation_of(call)} {call.adapter or self._model}"
        return FrontTurn(self._spans, self._spans.begin(title, name, parent, attributes=attributes))

    def _parsed(self, request: RequestNow) -> None:
        """Adds a span from a request's arrival to its first turn: reading, checking, recognizing."""
        facts = CALL_FACTS.get()
        if facts is not None and facts.turns == 1 and request.start_ns is not None:
            self._spans.was("parse", request.get_span_context(), request.start_ns, time.time_ns())


class UnkeptFrontTurn(Untraced):
    """A turn of a trace that is not kept. Replicas are told this and do not begin a trace."""

    def __init__(self, name: SpanContext) -> None:
        self._name = name

    def carried(self, call: TurnCall) -> TurnCall:
        return _carrying(call, self._name)


class FrontTurn:
    """Implements FrontTrace. Used on the front end's event loop."""

    def __init__(self, spans: Spans, span: OpenSpan) -> None:
        self._spans = spans
        self._span = span
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
            self._span.fail(error.info.code, error.info.message)
        elif isinstance(error, _LEFT):
            self._span.attributes["kedge.client_left"] = True
        elif kind is not None:
            self._span.fail(kind.__name__)
        self._span.end()

    def placing(self) -> AbstractContextManager[None]:
        return Within(self._spans.begin_below("place", self._span.name))

    @contextmanager
    def at(self, replica_id: str, epoch: int | None) -> Iterator[None]:
        attempt = self._attempt = self._spans.begin_below(
            "dispatch",
            self._span.name,
            kind=SpanKind.CLIENT,
            attributes={"kedge.replica_id": replica_id},
        )
        if epoch is not None:
            attempt.attributes["kedge.epoch"] = epoch
        try:
            yield
        finally:
            attempt.end()

    def carried(self, call: TurnCall) -> TurnCall:
        return _carrying(call, self._attempt.name)

    def ended_there(self, reason: str) -> None:
        if reason in _MOVED:
            self._attempt.attributes["kedge.moved"] = True
        else:
            self._attempt.fail(reason)

    def failed_over(self, reason: str) -> None:
        self._span.event("failover", {"reason": reason})

    def taken_over(self, replica_id: str) -> None:
        self._span.event("takeover", {"kedge.replica_id": replica_id})

    def tell(self, event: TurnEvent) -> None:
        if not self._heard and not event.says_nothing:
            self._heard = True
            self._span.attributes[FIRST_CHUNK] = time.perf_counter() - self._began_s
        if self._spans.records_content:
            self._text.append(event.text)
        if event.error is not None:
            self._span.fail(event.error.code, event.error.message)
        if event.finish is not None:
            self._span.attributes |= usage_attributes(event)
            if self._spans.records_content:
                text = "".join(self._text)
                self._span.attributes[OUTPUT_MESSAGES] = output_messages(text, event)


def _carrying(call: TurnCall, name: SpanContext) -> TurnCall:
    headers = headers_of(name)
    return replace(call, traceparent=headers[TRACEPARENT], tracestate=headers.get(TRACESTATE, ""))
