"""Spans as bytes: the same message as the exporter's own encoder makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from serving.trace.otlp import SpanEncoder

RESOURCE = Resource({"service.name": "kedge-ingress", "service.version": "1" * 200})
SCOPE = InstrumentationScope("kedge", "1.2.3")
STATE = TraceState([("vendor", "x"), ("other", "y")])


def name(span_id: int, *, is_remote: bool = False, state: TraceState | None = None) -> SpanContext:
    return SpanContext(0x0AF7651916CD43DD8448EB211C80319C, span_id, is_remote, TraceFlags(1), state)


def span(title: str = "turn", **fields: Any) -> ReadableSpan:
    made: dict[str, Any] = {"context": name(2), "resource": RESOURCE, "instrumentation_scope": SCOPE}
    made |= {"start_time": 1_790_000_000_123_456_789, "end_time": 1_790_000_000_223_456_789} | fields
    return ReadableSpan(title, **made)


VALUES = {
    "text": "käse 🧀",
    "long": "x" * 20_000,
    "empty": "",
    "zero": 0,
    "one": 1,
    "large": 300,
    "largest": 2**63 - 1,
    "negative": -5,
    "least": -(2**63),
    "float": 0.1,
    "nothing": 0.0,
    "yes": True,
    "no": False,
    "list": ["a", "b"],
    "tuple": (1, 2.5, False),
    "none of them": [],
}
SPANS = {
    "a root": [span()],
    "with attributes": [span(attributes=VALUES)],
    "a child": [span(parent=name(7), kind=SpanKind.CLIENT)],
    "a remote parent's": [
        span(parent=name(2**63, is_remote=True), context=name(3, state=STATE), kind=SpanKind.SERVER)
    ],
    "failed": [span(status=Status(StatusCode.ERROR, "it broke"), attributes={"error.type": "x"})],
    "failed without a word": [span(status=Status(StatusCode.ERROR))],
    "with events": [span(events=[Event("failover", {"reason": "lost"}, 5), Event("alone", None, 2**60)])],
    "many": [span(f"span {number}", attributes=VALUES) for number in range(300)],
    "none": [],
}


@pytest.mark.parametrize("which", SPANS)
def test_it_is_the_message_that_the_exporter_makes(which: str) -> None:
    spans = SPANS[which]
    told = ExportTraceServiceRequest.FromString(SpanEncoder(RESOURCE, SCOPE).request(spans))
    if spans:
        assert told == encode_spans(spans)
    assert sum(len(each.spans) for group in told.resource_spans for each in group.scope_spans) == len(spans)


def test_what_the_exporter_would_leave_out_is_told_as_text() -> None:
    odd = {"huge": 2**64, "broken": "\ud800"}
    told = ExportTraceServiceRequest.FromString(SpanEncoder(RESOURCE, SCOPE).request([span(attributes=odd)]))
    (one,) = told.resource_spans[0].scope_spans[0].spans
    assert {each.key: each.value.string_value for each in one.attributes} == {
        "huge": str(2**64),
        "broken": "?",
    }
