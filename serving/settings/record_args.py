"""Settings of what is recorded of calls: traces and logs. Nothing that was said is in them, unless it is asked for."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from serving.settings.strict_settings import NotEmpty, StrictModel

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
"""Comes with the extra `tracing`."""


class TracingArgs(StrictModel):
    """Spans of turns, sent to a collector at `endpoint` that speaks OTLP over HTTP; None: none are made. Of traces that
    begin here a share of `sample_ratio` is kept; one that a client has begun is kept if its `traceparent` says so.
    With `record_content` they have prompts and answers."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[^/\s]+")] | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    service_name: NotEmpty = "kedge"
    record_content: bool = False

    @field_validator("endpoint")
    @classmethod
    def _can_be_sent_to(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and "@" in urlsplit(endpoint).netloc:
            raise ValueError(
                "settings are written to logs, so a password must not be among them: the environment variable"
                " OTEL_EXPORTER_OTLP_HEADERS can have an authorization"
            )
        if endpoint is not None and not _is_there(EXPORTER):
            raise ValueError(
                "traces need a package that is not installed: .venv/bin/pip install -e '.[tracing]', in"
                " Kedge's folder, brings opentelemetry-exporter-otlp-proto-http. Or leave endpoint out"
            )
        return endpoint

    @field_validator("record_content")
    @classmethod
    def _in_spans(cls, record_content: bool, info: ValidationInfo) -> bool:
        if record_content and info.data.get("endpoint", "") is None:
            raise ValueError("is about spans, and without an endpoint none are made")
        return record_content

    @property
    def traces_url(self) -> str:
        """Where spans go: an endpoint without a path is a collector's, which has one for them."""
        assert self.endpoint is not None
        base = self.endpoint.rstrip("/")
        return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


class LogsArgs(StrictModel):
    """What front ends and replicas log, with Ray Serve's own lines. `access`: a line for each request, for those that
    ended in an error of the server's, or for none. With `content` it has the prompt and the answer."""

    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    access: Literal["off", "errors", "all"] = "off"
    content: bool = False

    @field_validator("content")
    @classmethod
    def _in_lines_of_requests(cls, content: bool, info: ValidationInfo) -> bool:
        if content and info.data.get("access") == "off":
            raise ValueError("is about the lines of access, which is off: set access to 'errors' or 'all'")
        return content


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False
