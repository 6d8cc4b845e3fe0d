"""The spans of turns at a replica: the turn, and the stages that it goes through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from serving.trace.gen_ai import (
    END_TO_END,
    FIRST_TOKEN,
    IN_DECODE,
    IN_PREFILL,
    IN_QUEUE,
    conversation_of,
)
from serving.trace.spans import TRACEPARENT, TRACESTATE, Spans, fail
from serving.wire.turns import TurnCall, TurnEvent

NS = 1_000_000_000


class ReplicaTurns:
    """Implements ReplicaTraces (turn_traces.py)."""

    def __init__(self, spans: Spans, replica_id: str) -> None:
        self._spans = spans
        self._replica_id = replica_id

    def turn(self, call: TurnCall, epoch: int | None) -> ReplicaTurn:
        headers = {TRACEPARENT: call.traceparent, TRACESTATE: call.tracestate}
        found: dict[str, AttributeValue | None] = {
            "kedge.replica_id": self._replica_id,
            "kedge.epoch": epoch,
            "gen_ai.response.id": call.request_id,
            "gen_ai.conversation.id": conversation_of(call),
            "kedge.resumed_tokens": None if call.resumed is None else len(call.resumed.token_ids),
        }
        span = self._spans.tracer.start_span(
            "turn",
            context=self._spans.context_in(headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in found.items() if value is not None},
        )
        return ReplicaTurn(self._spans, span)


class ReplicaTurn:
    """Implements ReplicaTrace. Used on the replica's event loop, but for `on_admitted`."""

    def __init__(self, spans: Spans, span: Span) -> None:
        self._spans = spans
        self._span = span
        self._context = set_span_in_context(span)
        self._began_ns = time.time_ns()
        self._submitted_ns = self._first_ns = 0
        self._admitted_ns: int | None = None
        """Set once, on the engine's thread, before the engine tells anything of the turn."""

    def __enter__(self) -> ReplicaTurn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._span.set_attribute("kedge.client_left", True)
        elif kind is not None:
            fail(self._span, kind.__name__)
        self._span.end()

    def on_admitted(self) -> None:
        """A request that was put back, and runs again, has waited only once."""
        if self._admitted_ns is None:
            self._admitted_ns = time.time_ns()

    def submitted(self) -> None:
        self._submitted_ns = time.time_ns()
        self._stage("begin", self._began_ns, self._submitted_ns)

    def computed_first(self) -> None:
        self._first_ns = now_ns = time.time_ns()
        # The engine may have let it in before its own thread had the processor again.
        admitted_ns = max(self._admitted_ns or now_ns, self._submitted_ns)
        self._stage("queue", self._submitted_ns, admitted_ns, IN_QUEUE)
        self._stage("prefill", admitted_ns, now_ns, IN_PREFILL)
        self._span.set_attribute(FIRST_TOKEN, (now_ns - self._began_ns) / NS)

    def computed(self) -> None:
        if self._first_ns:
            self._stage("decode", self._first_ns, time.time_ns(), IN_DECODE)
        elif self._admitted_ns is None:  # nothing came of it
            self._stage("queue", self._submitted_ns, time.time_ns(), IN_QUEUE)

    @contextmanager
    def committing(self) -> Iterator[None]:
        with self._spans.tracer.start_as_current_span("commit", context=self._context):
            yield

    def ended(self, event: TurnEvent) -> None:
        self._span.set_attribute(END_TO_END, (time.time_ns() - self._began_ns) / NS)
        if event.turn_index is not None:
            self._span.set_attribute("kedge.turn", event.turn_index)
        if event.replayed:
            self._span.set_attribute("kedge.replayed", True)
        if event.error is not None:
            fail(self._span, event.error.code, event.error.message)

    def _stage(self, name: str, start_ns: int, end_ns: int, latency: str | None = None) -> None:
        self._spans.tracer.start_span(name, context=self._context, start_time=start_ns).end(end_ns)
        if latency is not None:
            self._span.set_attribute(latency, (end_ns - start_ns) / NS)
