"""A collector of spans: a real HTTP server on a thread, which reads what an OTLP exporter sends, as protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class Span:
    """A received span. Ids are hexadecimal, as in `traceparent`. A root's `parent_id` is empty."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: dict[str, dict[str, Any]]

    @property
    def took_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass
class Collector:
    """The spans that were received. `paths` are the paths that were called."""

    endpoint: str
    spans: list[Span] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    raw: list[bytes] = field(default_factory=list)

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        self.raw.append(body)
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(group.resource.attributes)["service.name"]
            self.spans += [_span(service, each) for scope in group.scope_spans for each in scope.spans]

    def named(self, name: str) -> list[Span]:
        """The spans of this name in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def tree(self, root_id: str = "") -> str:
        """The names of the spans as a tree. Children are indented, in the order in which they began."""
        return "\n".join(self._lines(root_id, 0))

    def children(self, parent_id: str) -> list[Span]:
        found = [span for span in self.spans if span.parent_id == parent_id]
        return sorted(found, key=lambda span: span.start_ns)

    def _lines(self, parent_id: str, depth: int) -> Iterator[str]:
        for span in self.children(parent_id):
            yield "  " * depth + span.name
            yield from self._lines(span.span_id, depth + 1)


@contextmanager
def running_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _span(service: str, told: SpanMessage) -> Span:
    return Span(
        told.name,
        service,
        told.trace_id.hex(),
        told.span_id.hex(),
        told.parent_span_id.hex(),
        told.start_time_unix_nano,
        told.end_time_unix_nano,
        told.status.code == Status.STATUS_CODE_ERROR,
        _values(told.attributes),
        {event.name: _values(event.attributes) for event in told.events},
    )


def _values(attributes: Any) -> dict[str, Any]:
    told: list[KeyValue] = list(attributes)
    return {each.key: _value(each.value) for each in told}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, str(kind))
