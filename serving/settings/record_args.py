"""Settings of what is recorded of calls: traces and logs. Nothing that was said is in them, unless it is asked for."""

from __future__ import annotations

import importlib.util
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from serving.settings.strict_settings import Interval, NotEmpty, StrictModel, matching, yaml_off

EXPORTER = "opentelemetry.exporter.otlp.proto.http"
"""Comes with the extra `tracing`."""


class TracingArgs(StrictModel):
    """Spans of turns ([traces](operations/traces-and-logs.md#traces))."""

    endpoint: Annotated[str, matching(r"https?://[^/\s]+.*", "http://… or https://…")] | None = Field(
        default=None,
        description="""Where spans are sent: a collector that speaks OTLP over HTTP, such as
        `http://collector:4318`. Unless set, no spans are made.""",
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="""The share that is kept of the traces that begin here. One that a client has
        begun is kept if its `traceparent` says so.""",
    )
    service_name: NotEmpty = Field(
        default="kedge",
        description="The beginning of the services' names: `kedge-ingress`, `kedge-replica`.",
    )
    record_content: bool = Field(
        default=False,
        description="Spans contain prompts and answers too. Needs `endpoint`.",
    )

    @field_validator("sample_ratio", "service_name")
    @classmethod
    def _of_spans(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("endpoint", "") is None and not cls.is_default(info.field_name, value):
            raise ValueError("is about spans, and without an endpoint none are made")
        return value

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
    """What front ends and replicas [log](operations/traces-and-logs.md#logs), with Ray Serve's own lines."""

    format: Literal["text", "json"] = Field(
        default="text",
        description="`json` writes one JSON object a line, with what is known of the call.",
    )
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO",
        description="The lowest level that is logged.",
    )
    access: Annotated[Literal["off", "errors", "all"], BeforeValidator(yaml_off)] = Field(
        default="off",
        description="`all` logs a line for each request, `errors` for those that end in a 5xx.",
    )
    content: bool = Field(
        default=False,
        description="The lines of `access`, which must not be `off`, contain prompts and answers too.",
    )

    @field_validator("content")
    @classmethod
    def _in_lines_of_requests(cls, content: bool, info: ValidationInfo) -> bool:
        if content and info.data.get("access") == "off":
            raise ValueError("is about the lines of access, which is off: set access to 'errors' or 'all'")
        return content


class MetricsArgs(StrictModel):
    """What [metrics](operations/alerts.md) say, and how often replicas check their books."""

    cluster_name: NotEmpty = Field(
        default="kedge",
        description="The label `cluster` of every metric. Clusters that share a Prometheus need different names.",
    )
    ray_llm_names: Literal["none", "vllm", "sglang"] = Field(
        default="none",
        description="""`vllm` or `sglang`: Ray's metrics have the figures also under the names that
        [Ray's own boards](metrics.md#rays-own-boards-for-llms) for vLLM or SGLang read.""",
    )
    audit_interval_s: Interval | None = Field(
        default=60.0,
        description="""How often each replica [walks over all of its pages](operations/console.md#audit) by
        itself; null: only when asked.""",
    )
    tenant_names: bool = Field(
        default=False,
        description="The tenants with the most KV are named in `kedge_tenant_kv_bytes`. `/metrics` needs no key.",
    )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it would be in
        return False
