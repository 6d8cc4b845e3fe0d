"""Makes spans and sends them to the collector. Imported only where there is one: OpenTelemetry takes a while."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from opentelemetry.context import Context, get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.settings.record_args import TracingArgs

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
SEND_TIMEOUT_S = 5.0
"""For one batch. What the collector does not take by then is tried again for as long, and dropped."""
ERROR_TYPE = "error.type"


class Spans:
    """One process's, sent in batches on a thread of its own. It has a provider of its own: Ray's, if Ray traces, sends
    elsewhere, and both are of one trace all the same, since the current span is Python's own affair (contextvars)."""

    def __init__(self, args: TracingArgs, component: str, instance_id: str) -> None:
        version = importlib.metadata.version("kedge")
        resource = {
            "service.name": f"{args.service_name}-{component}",
            "service.instance.id": instance_id,
            "service.version": version,
        }
        self.records_content = args.record_content
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(args.sample_ratio),
            resource=Resource.create(resource),
            shutdown_on_exit=False,
        )
        exporter = OTLPSpanExporter(endpoint=args.traces_url, timeout=SEND_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("kedge", version)
        self._propagator = TraceContextTextMapPropagator()

    def parent_in(self, headers: Mapping[str, str]) -> Context:
        """Whose child a call's span is: of the span that is current, if Ray Serve has one; else of the caller's, if it
        names one; else of none."""
        current = get_current()
        if get_current_span(current).get_span_context().is_valid:
            return current
        return self.context_in(headers)

    def context_in(self, headers: Mapping[str, str]) -> Context:
        """In which a span is the child of the one that is named there; of none, if none is."""
        return self._propagator.extract(headers, context=Context())

    def headers_of(self, span: Span) -> dict[str, str]:
        """What makes the spans of whoever gets it the span's children."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context=set_span_in_context(span))
        return headers

    def flush(self) -> None:
        """Sends what is left, within SEND_TIMEOUT_S."""
        self._provider.force_flush(int(SEND_TIMEOUT_S * 1000))

    def close(self) -> None:
        """Likewise, for good."""
        self.flush()
        self._provider.shutdown()


def trace_id_of(span: Span) -> str:
    """As logs and other systems write it."""
    return f"{span.get_span_context().trace_id:032x}"


def fail(span: Span, kind: str, message: str | None = None) -> None:
    """The span is of something that went wrong."""
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, message))
