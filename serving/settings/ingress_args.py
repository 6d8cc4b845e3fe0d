"""Settings of the front ends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from serving.settings.settings_paths import resolve_path
from serving.settings.strict_settings import Interval, NotEmpty, PositiveInt, Seconds, StrictModel, matching

MIB = 1024 * 1024

HostName = Annotated[
    str,
    matching(
        r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
        "a name in lower case and without a port, or *.example.com for all names below that one,",
    ),
]
Origin = Annotated[
    str,
    matching(
        r"[a-z][a-z0-9+.-]*://[^/\s*]+",
        "a site as browsers name it, such as https://pages.example, without a path,",
    ),
]
"""Scheme, host, and port if it is not the scheme's own."""

LOOPBACK = "127.0.0.1"


class IngressArgs(StrictModel):
    """The HTTP front ends."""

    count: PositiveInt = Field(default=1, description="How many front ends there are.")
    num_cpus: Annotated[float, Field(ge=0)] = Field(
        default=0.1,
        description="CPUs that Ray reserves for each front end.",
    )
    max_ongoing_requests: PositiveInt = Field(
        default=4096, description="Requests in flight through one front end."
    )
    max_background_responses: PositiveInt = Field(
        default=256,
        description="""Responses that one front end makes in the background (`background: true`) at a
        time; more are refused with 429. A front end that stops lets them run for half of
        `graceful_shutdown_timeout_s`.""",
    )
    failover_timeout_s: Seconds = Field(
        default=30.0,
        description="""How long a call waits for another replica when its own is lost, before its first
        token and in mid-stream. A call also waits this long, before it begins, for a session log or a
        controller that does not answer. When the stream of events from a replica breaks, the front end
        first tries to open it again, for a tenth of this time.""",
    )
    keep_alive_s: Interval = Field(
        default=5.0,
        description="""How long a stream may be silent, while its turn is in a queue or waits for the
        session log, before a comment is sent.""",
    )
    max_websockets: Annotated[PositiveInt, Field(validate_default=True)] = Field(
        default=1024,
        description="""WebSockets open through one front end. For another one, the one that has been
        idle for longest is closed; if none is idle, the new one gets 503. Each is a request in flight
        for Ray Serve, so it must be below `max_ongoing_requests`.""",
    )
    graceful_shutdown_timeout_s: Seconds = Field(
        default=60.0,
        description="How long open streams may take when a front end stops; it gets no new calls meanwhile.",
    )
    allowed_hosts: tuple[HostName, ...] = Field(
        default=(),
        strict=False,
        description="""Names of the server that calls may use, in lower case and without a port;
        `*.example.com` is all names below that one. See [Browsers](operations/keys.md#browsers).""",
    )
    allowed_origins: tuple[Origin, ...] = Field(
        default=(),
        strict=False,
        description="""Sites whose pages may call, as [browsers](operations/keys.md#browsers) name them:
        `https://pages.example`.""",
    )
    keys_file: NotEmpty | None = Field(
        default=None,
        description="A file with the hashes of [keys](operations/keys.md).",
    )
    incremental_streaming_output: bool = Field(
        default=False,
        description="""An event of `/generate`'s streams has only the new text, as with SGLang's option
        of this name. Without it each event repeats all text so far, and long answers have fewer events.""",
    )
    operator_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="""The only port at which [operators' calls](operations/keys.md) are taken, another
        than `http_options.port`. Unless set, the usual port takes them.""",
    )
    operator_host: NotEmpty = Field(
        default=LOOPBACK,
        description="The address that `operator_port` listens on, on each machine with a front end.",
    )
    max_body_mib: Annotated[float, Field(gt=0, le=1024)] | None = Field(
        default=None,
        description="""How large a request's body may be. Unless set, 4 MiB and 64 bytes for each token
        of the model's context, at most 32 MiB.""",
    )

    @field_validator("max_websockets")
    @classmethod
    def _beside_other_requests(cls, max_websockets: int, info: ValidationInfo) -> int:
        requests = info.data.get("max_ongoing_requests")
        if requests is not None and max_websockets >= requests:
            raise ValueError(
                f"{max_websockets} is not below max_ongoing_requests, {requests}: each WebSocket is a request in flight"
            )
        return max_websockets

    @field_validator("operator_host")
    @classmethod
    def _of_the_operators_port(cls, host: str, info: ValidationInfo) -> str:
        if not cls.is_default(info.field_name, host) and info.data.get("operator_port", 0) is None:
            raise ValueError("is where operator_port listens, and there is no operator_port")
        return host

    @property
    def max_body_bytes(self) -> int | None:
        return None if self.max_body_mib is None else int(self.max_body_mib * MIB)

    @property
    def keys_path(self) -> str | None:
        """Relative to the repository, or to the working directory."""
        return None if self.keys_file is None else resolve_path(self.keys_file)


class ApiArgs(StrictModel):
    """What requests may contain."""

    unknown_fields: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="""`ignore` accepts fields that no protocol here knows; the header
        `x-kedge-ignored-fields` of the reply names them. A field that is known and not supported is
        refused in any case.""",
    )
    request_chat_template: bool = Field(
        default=False,
        description="""A chat request may bring a `chat_template` of its own. A template is a program.
        It runs in Jinja's sandbox, on one of the two threads of a replica for long prompts, and nothing
        ends it early. Its client is told after 30 s that it took too long (429). The sandbox refuses a
        `range` of more than 100,000, but nested loops or a very long repeated text may still occupy the
        thread for good, or use up the replica's memory. Turn it on where clients are trusted.""",
    )
    request_priority: bool = Field(
        default=False,
        description="""A request may have a `priority` other than 0, by which it goes before others
        that wait, those of other tenants included. Turn it on where clients trust each other, or behind
        a gateway that sets it. As long as more urgent requests keep coming, the others may wait. A
        running turn gives way only when KV pages are short, and goes on later where it was. The limits
        of `tenants` hold as always.""",
    )
