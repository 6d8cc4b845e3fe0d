"""Facts about a server, gathered with several calls: for `kedge info`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from serving.cli.client.server import ServerError, ask_kedge, request_json

NOT_ALLOWED = (401, 403)
LIMITS = {
    "context_len": ("scheduler", "max_context_len"),
    "max_running": ("scheduler", "max_running"),
    "max_waiting": ("scheduler", "max_waiting"),
    "max_sessions": ("controller", "max_sessions"),
    "session_idle_timeout_s": ("sessions", "idle_timeout_s"),
    "max_ongoing_requests": ("ingress", "max_ongoing_requests"),
    "tenant_max_sessions": ("tenants", "max_sessions"),
    "tenant_max_history_tokens": ("tenants", "max_history_tokens"),
    "tenant_max_turns_in_flight": ("tenants", "max_turns_in_flight"),
    "tenant_max_queued_tokens": ("tenants", "max_queued_tokens"),
}
"""For each limit, the section and key of the settings that have it."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """`info` is the reply of /get_server_info. It is None if the key is not an operator's; `refusal` then says so."""

    url: str
    version: str
    healthy: bool
    models: list[dict[str, Any]]
    info: dict[str, Any] | None
    refusal: str | None

    @property
    def replicas(self) -> list[dict[str, Any]]:
        return [] if self.info is None else list(self.info.get("replicas") or [])

    @property
    def ingresses(self) -> list[dict[str, Any]]:
        return [] if self.info is None else list(self.info.get("ingresses") or [])

    @property
    def settings(self) -> dict[str, Any]:
        return {} if self.info is None else dict(self.info.get("settings") or {})

    @property
    def proxy(self) -> str | None:
        """What takes HTTP calls in front of the front ends; None if they do not say."""
        return next((each["proxy"] for each in self.ingresses if "proxy" in each), None)

    @property
    def limits(self) -> dict[str, Any]:
        """The limits by name; None means no such limit. Empty values if the settings are not known."""
        settings = self.settings
        limits = {name: (settings.get(section) or {}).get(key) for name, (section, key) in LIMITS.items()}
        if self.models:
            limits["context_len"] = self.models[0].get("max_model_len")
        return limits

    def document(self) -> dict[str, Any]:
        """The facts as JSON, for programs."""
        return {
            "url": self.url,
            "version": self.version,
            "healthy": self.healthy,
            "models": self.models,
            "proxy": self.proxy,
            "ingresses": None if self.info is None else self.ingresses,
            "replicas": None if self.info is None else [_replica(each) for each in self.replicas],
            "limits": self.limits,
            "note": self.refusal,
        }


def gather_facts(client: httpx.Client) -> ServerFacts:
    """Raises ServerError if no server answers or if it is not Kedge."""
    version = str(ask_kedge(client, "GET", "/version", fields=("version",))["version"])
    info, refusal = None, None
    try:
        info = request_json(client, "GET", "/get_server_info")
    except ServerError as error:
        if error.status not in NOT_ALLOWED:
            raise
        refusal = f"replicas, pools and limits are for operators ({error})"
    return ServerFacts(
        url=str(client.base_url).rstrip("/"),
        version=version,
        healthy=_is_healthy(client),
        models=list(ask_kedge(client, "GET", "/v1/models", fields=("data",))["data"]),
        info=info,
        refusal=refusal,
    )


def pools_of(replica: dict[str, Any]) -> dict[str, dict[str, int]]:
    """The replica's KV pools by name, as pages by account, with the bytes of a page."""
    pools = {"full": replica["pages"] | {"page_bytes": replica["page_size_bytes"]}}
    if replica.get("window_pages"):
        pools["window"] = replica["window_pages"] | {"page_bytes": replica["window_page_size_bytes"]}
    return pools


def state_of(replica: dict[str, Any]) -> str:
    return str(replica.get("state", "up"))


def _is_healthy(client: httpx.Client) -> bool:
    """A cluster that cannot answer says so with an error status. Raises ServerError if there is no reply."""
    try:
        request_json(client, "GET", "/health")
    except ServerError as error:
        if error.status is None:
            raise
        return False
    return True


def _replica(replica: dict[str, Any]) -> dict[str, Any]:
    named = ("replica_id", "sessions", "running", "waiting", "host", "disk", "execution")
    return {name: replica[name] for name in named} | {"state": state_of(replica), "pools": pools_of(replica)}
