"""The cluster whose turns are traced and logged as JSON, and whose conversations without a name are durable."""

from __future__ import annotations

from typing import Any

from served_cluster import Edit


def durable_and_traced(endpoint: str) -> Edit:
    """Spans go to the collector at `endpoint`. Conversations without a name begin where their cookie `stick` says."""

    def edit(document: dict[str, Any]) -> None:
        args = document["applications"][0]["args"]
        args.setdefault("sessions", {})["unnamed"] = {"durable": True, "affinity": {"cookie": "stick"}}
        args["tracing"] = {"endpoint": endpoint}
        args["logs"] = {"format": "json", "access": "all"}

    return edit
