"""Calls of Kedge's own API on sessions, from the client's side. Each raises ServerError."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import httpx

from serving.cli.client.server import request_json

SESSIONS_PATH = "/v1/kedge/sessions"


def path_of(session_id: str, action: str = "") -> str:
    return f"{SESSIONS_PATH}/{quote(session_id, safe='')}{action}"


def all_sessions(client: httpx.Client) -> list[dict[str, Any]]:
    """The ledger's entry of each session, read page by page."""
    rows: list[dict[str, Any]] = []
    path = SESSIONS_PATH
    while True:
        page = request_json(client, "GET", path)
        rows += page["sessions"]
        if (after := page.get("next")) is None:
            return rows
        path = f"{SESSIONS_PATH}?{urlencode({'after': after})}"


def read_session(client: httpx.Client, session_id: str) -> dict[str, Any]:
    """The ledger's entry of one session, with its `messages` and `checkpoints`."""
    found: dict[str, Any] = request_json(client, "GET", path_of(session_id, "?messages=true"))
    return found


def fork_session(
    client: httpx.Client,
    session_id: str,
    *,
    at: int | None = None,
    turn: int | None = None,
    new_session_id: str | None = None,
) -> dict[str, Any]:
    """Starts a session with the first `at` committed tokens of another, or with those up to the end of its `turn`. If
    both are None, with all of them.

    Returns its `session_id`, its `tokens`, and the `cached_tokens` whose KV it shares.
    """
    body = {"length": at, "turn": turn, "new_session_id": new_session_id}
    forked: dict[str, Any] = request_json(client, "POST", path_of(session_id, "/fork"), _given(body))
    return forked


def rewind_session(
    client: httpx.Client, session_id: str, *, to: int | None = None, turn: int | None = None
) -> dict[str, Any]:
    """Keeps the first `to` committed tokens, or those up to the end of `turn`. Returns `session_id` and `tokens`."""
    body = _given({"length": to, "turn": turn})
    kept: dict[str, Any] = request_json(client, "POST", path_of(session_id, "/rewind"), body)
    return kept


def move_session(client: httpx.Client, session_id: str, to: str | None) -> dict[str, Any]:
    """Moves it to replica `to`; None: any other. Returns `session_id`, `from`, `to`, `epoch` and `moved`."""
    moved: dict[str, Any] = request_json(client, "POST", path_of(session_id, "/move"), {"to": to})
    return moved


def close_session(client: httpx.Client, session_id: str) -> None:
    """Ends it for good."""
    request_json(client, "DELETE", path_of(session_id))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
