"""Shell completion of ids: the sessions or replicas of the server that the command line names.

It offers nothing if the server refuses or does not answer within PATIENCE_S. It never prints anything.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Any

import typer

from serving.cli.client.server import ServerError, request_json, server_at

PATIENCE_S = 1.0
"""For the whole completion: the user is waiting."""
MOST_OFFERED = 200
"""Sessions to offer; nobody reads a longer list."""


def session_ids(context: typer.Context, incomplete: str) -> list[str]:
    found = _asked(context, f"/v1/kedge/sessions?limit={MOST_OFFERED}")
    named = context.params.get("session_ids") or ()
    ids = [str(row["session_id"]) for row in _rows(found, "sessions") if "session_id" in row]
    return [each for each in dict.fromkeys(ids) if each.startswith(incomplete) and each not in named]


def replica_ids(context: typer.Context, incomplete: str) -> list[str]:
    found = _asked(context, "/get_server_info")
    ids = [str(row["replica_id"]) for row in _rows(found, "replicas") if "replica_id" in row]
    return [each for each in ids if each.startswith(incomplete)]


def _asked(context: typer.Context, path: str) -> Any:
    """The reply; None if there is no good one in time. It runs in a thread, since a DNS lookup has no timeout."""
    url = _option(context, "url", "KEDGE_URL") or "http://127.0.0.1:8000"
    key, tenant = _option(context, "api_key", "KEDGE_API_KEY"), _option(context, "tenant", "KEDGE_TENANT")
    answers: list[Any] = []

    def ask() -> None:
        with suppress(ServerError), server_at(url, key, timeout=PATIENCE_S, tenant=tenant) as client:
            answers.append(request_json(client, "GET", path))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    return answers[0] if answers else None


def _option(context: typer.Context, name: str, variable: str) -> str | None:
    """The option's value on this command's line or a parent's; otherwise that of the environment variable."""
    level: Any = context
    while level is not None:
        if value := level.params.get(name):
            return str(value)
        level = level.parent
    return os.environ.get(variable)


def _rows(found: Any, name: str) -> list[dict[str, Any]]:
    rows = found.get(name) if isinstance(found, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
