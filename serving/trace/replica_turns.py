"""The spans of turns at a replica: the turn, and the stages that it goes through."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from types import TracebackType

from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from serving.trace.gen_ai import (
    END_TO_END,
    FIRST_TOKEN,
    IN_DECODE,
    IN_PREFILL,
    IN_QUEUE,
    conversation_of,
)
from serving.trace.open_span import Current, OpenSpan, Within
from serving.trace.spans import TRACEPARENT, TRACESTATE, Spans, is_kept
from serving.trace.turn_traces import ReplicaTrace, Untraced
from serving.wire.turns import TurnCall, TurnEvent

NS = 1_000_000_000


class ReplicaTurns:
    """Implements ReplicaTraces (turn_traces.py)."""

    def __init__(self, spans: Spans, replica_id: str) -> None:
        self._spans = spans
        self._replica_id = replica_id

    def turn(self, call: TurnCall, epoch: int | None) -> ReplicaTrace:
        headers = {TRACEPARENT: call.traceparent, TRACESTATE: call.tracestate}
        name, parent = self._spans.named_in(self._spans.context_in(headers))
        if not is_kept(name):
            return UnkeptReplicaTurn(name)
        found: dict[str, AttributeValue | None] = {
            "kedge.replica_id": self._replica_id,
            "kedge.epoch": epoch,
            "gen_ai.response.id": call.request_id,
            "gen_ai.conversation.id": conversation_of(call),
            "kedge.resumed_tokens": None if call.resumed is None else len(call.resumed.token_ids),
        }
        attributes = {key: value for key, value in found.items() if value is not None}
        span = self._spans.begin("turn", name, parent, kind=SpanKind.SERVER, attributes=attributes)
        return ReplicaTurn(self._spans, span)


class UnkeptReplicaTurn(Untraced):
    """A turn of a trace that is not kept. Any span that begins while it commits is told so."""

    def __init__(self, name: SpanContext) -> None:
        self._name = name

    def committing(self) -> AbstractContextManager[None]:
        return Current(NonRecordingSpan(self._name))


class ReplicaTurn:
    """Implements ReplicaTrace. Used on the replica's event loop, except `on_admitted`."""

    def __init__(self, spans: Spans, span: OpenSpan) -> None:
        self._spans = spans
        self._span = span
        self._began_ns = span.start_ns
        self._submitted_ns = self._first_ns = 0
        self._admitted_ns: int | None = None
        """Set once, on the engine's thread, before the engine reports anything about the turn."""

    def __enter__(self) -> ReplicaTurn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._span.attributes["kedge.client_left"] = True
        elif kind is not None:
            self._span.fail(kind.__name__)
        self._span.end()

    def on_admitted(self) -> None:
        """Only the first call counts: a request that was put back and runs again has waited once."""
        if self._admitted_ns is None:
            self._admitted_ns = time.time_ns()

    def submitted(self) -> None:
        self._submitted_ns = time.time_ns()
        self._stage("begin", self._began_ns, self._submitted_ns)

    def computed_first(self) -> None:
        self._first_ns = now_ns = time.time_ns()
        # The engine may have admitted the turn before the thread that submitted it had the processor again.
        admitted_ns = max(self._admitted_ns or now_ns, self._submitted_ns)
        self._stage("queue", self._submitted_ns, admitted_ns, IN_QUEUE)
        self._stage("prefill", admitted_ns, now_ns, IN_PREFILL)
        self._span.attributes[FIRST_TOKEN] = (now_ns - self._began_ns) / NS

    def computed(self) -> None:
        if self._first_ns:
            self._stage("decode", self._first_ns, time.time_ns(), IN_DECODE)
        elif self._admitted_ns is None:  # it never ran
            self._stage("queue", self._submitted_ns, time.time_ns(), IN_QUEUE)

    def committing(self) -> AbstractContextManager[None]:
        return Within(self._spans.begin_below("commit", self._span.name))

    def ended(self, event: TurnEvent) -> None:
        self._span.attributes[END_TO_END] = (time.time_ns() - self._began_ns) / NS
        if event.turn_index is not None:
            self._span.attributes["kedge.turn"] = event.turn_index
        if event.replayed:
            self._span.attributes["kedge.replayed"] = True
        if event.error is not None:
            self._span.fail(event.error.code, event.error.message)

    def _stage(self, name: str, start_ns: int, end_ns: int, latency: str | None = None) -> None:
        self._spans.was(name, self._span.name, start_ns, end_ns)
        if latency is not None:
            self._span.attributes[latency] = (end_ns - start_ns) / NS
