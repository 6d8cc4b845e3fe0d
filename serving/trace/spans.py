"""Makes spans and sends them to the collector. Imported only if there is one: importing OpenTelemetry is slow."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from opentelemetry.context import Context, get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from serving.settings.record_args import TracingArgs
from serving.trace.open_span import OpenSpan

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
SEND_TIMEOUT_S = 5.0
"""Timeout for one batch. What the collector does not take by then is retried for as long, and then dropped."""
NO_SPAN = Context()
_KEPT, _NOT_KEPT = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


class Spans:
    """The spans of one process, sent in batches on its own thread, separate from Ray's spans if Ray traces. Both still
    belong to one trace, since the current span is in Python's contextvars. Whether a trace is kept is decided when it
    begins. A trace that is not kept has only names, which are passed on to callees."""

    def __init__(self, args: TracingArgs, component: str, instance_id: str) -> None:
        version = importlib.metadata.version("kedge")
        self.records_content = args.record_content
        self._resource = Resource.create(
            {
                "service.name": f"{args.service_name}-{component}",
                "service.instance.id": instance_id,
                "service.version": version,
            }
        )
        self._scope = InstrumentationScope("kedge", version)
        self._sampler = TraceIdRatioBased(args.sample_ratio)
        self._ids = RandomIdGenerator()
        self._sender = BatchSpanProcessor(OTLPSpanExporter(endpoint=args.traces_url, timeout=SEND_TIMEOUT_S))
        self._propagator = TraceContextTextMapPropagator()

    def parent_in(self, headers: Mapping[str, str]) -> Context:
        """The context with the parent of a call's span: the current span if Ray Serve has one; else the caller's, if
        the headers name one; else none."""
        current = get_current()
        if get_current_span(current).get_span_context().is_valid:
            return current
        return self.context_in(headers)

    def context_in(self, headers: Mapping[str, str]) -> Context:
        """A context whose parent is the span named in the headers; without a parent if they name none."""
        return self._propagator.extract(headers, context=NO_SPAN) if headers.get(TRACEPARENT) else NO_SPAN

    def named_in(self, parent: Context) -> tuple[SpanContext, SpanContext | None]:
        """Names for a new span in this context and for its parent. The name's flags say whether the span is kept."""
        above = get_current_span(parent).get_span_context()
        if above.is_valid:
            return self.named_below(above), above
        trace_id = self._ids.generate_trace_id()
        chosen = self._sampler.should_sample(None, trace_id, "")
        flags = _KEPT if chosen.decision is Decision.RECORD_AND_SAMPLE else _NOT_KEPT
        return SpanContext(trace_id, self._ids.generate_span_id(), False, flags), None

    def named_below(self, above: SpanContext) -> SpanContext:
        """The name of a child's span, which is kept if its parent is."""
        return SpanContext(
            above.trace_id, self._ids.generate_span_id(), False, above.trace_flags, above.trace_state
        )

    def begin(
        self,
        title: str,
        name: SpanContext,
        parent: SpanContext | None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> OpenSpan:
        """Begins a span of a trace that is kept."""
        return OpenSpan(self, title, name, parent, kind, dict(attributes or {}))

    def begin_below(
        self,
        title: str,
        parent: SpanContext,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> OpenSpan:
        return self.begin(title, self.named_below(parent), parent, kind=kind, attributes=attributes)

    def was(self, title: str, parent: SpanContext, start_ns: int, end_ns: int) -> None:
        """Sends a span that is over and has no attributes or events."""
        self._sender.on_end(
            ReadableSpan(
                title,
                self.named_below(parent),
                parent,
                self._resource,
                start_time=start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def ended(self, span: OpenSpan, end_ns: int) -> None:
        """Queues the span to be sent. Nothing may be added to it after this."""
        self._sender.on_end(
            ReadableSpan(
                span.title,
                span.name,
                span.parent,
                self._resource,
                attributes=span.attributes,
                events=span.events,
                kind=span.kind,
                status=span.status,
                start_time=span.start_ns,
                end_time=end_ns,
                instrumentation_scope=self._scope,
            )
        )

    def flush(self) -> None:
        """Sends what remains, within SEND_TIMEOUT_S."""
        self._sender.force_flush(int(SEND_TIMEOUT_S * 1000))

    def close(self) -> None:
        """Sends what remains and shuts down."""
        self.flush()
        self._sender.shutdown()  # type: ignore[no-untyped-call]


def headers_of(name: SpanContext) -> dict[str, str]:
    """Headers that make the receiver's spans children of this span."""
    told = {TRACEPARENT: f"00-{name.trace_id:032x}-{name.span_id:016x}-{name.trace_flags:02x}"}
    if name.trace_state:
        told[TRACESTATE] = name.trace_state.to_header()
    return told


def trace_id_of(name: SpanContext) -> str:
    """The trace id in the form that logs and other systems use."""
    return f"{name.trace_id:032x}"


def is_kept(name: SpanContext) -> bool:
    """Whether its trace is kept."""
    return name.trace_flags.sampled
