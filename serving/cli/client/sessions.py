"""Calls of Kedge's own API on sessions, from the client's side. Each raises ServerError."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import httpx

from serving.cli.client.server import ask_kedge, checked_name, request_json

SESSIONS_PATH = "/v1/kedge/sessions"


_SHOWN = (
    "session_id",
    "replica_id",
    "epoch",
    "tokens",
    "turns",
    "size_bytes",
    "in_turn",
    "idle_s",
    "messages",
    "checkpoints",
)
"""What `kedge sessions show` prints of a session."""


def path_of(session_id: str, action: str = "") -> str:
    return f"{SESSIONS_PATH}/{quote(checked_name(session_id, 'SESSION_ID'), safe='')}{action}"


def all_sessions(client: httpx.Client) -> list[dict[str, Any]]:
    """The ledger's entry of each session, read page by page."""
    rows: list[dict[str, Any]] = []
    path = SESSIONS_PATH
    while True:
        page = ask_kedge(client, "GET", path, fields=("sessions",))
        rows += page["sessions"]
        if (after := page.get("next")) is None:
            return rows
        path = f"{SESSIONS_PATH}?{urlencode({'after': after})}"


def read_session(client: httpx.Client, session_id: str) -> dict[str, Any]:
    """The ledger's entry of one session, with its `messages` and `checkpoints`."""
    return ask_kedge(client, "GET", path_of(session_id, "?messages=true"), fields=_SHOWN)


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
    told = ("session_id", "tokens", "cached_tokens")
    return ask_kedge(client, "POST", path_of(session_id, "/fork"), _given(body), fields=told)


def rewind_session(
    client: httpx.Client, session_id: str, *, to: int | None = None, turn: int | None = None
) -> dict[str, Any]:
    """Keeps the first `to` committed tokens, or those up to the end of `turn`. Returns `session_id` and `tokens`."""
    body = _given({"length": to, "turn": turn})
    return ask_kedge(client, "POST", path_of(session_id, "/rewind"), body, fields=("session_id", "tokens"))


def move_session(client: httpx.Client, session_id: str, to: str | None) -> dict[str, Any]:
    """Moves it to replica `to`; None: any other. Returns `session_id`, `from`, `to`, `epoch` and `moved`."""
    told = ("session_id", "from", "to", "epoch", "moved")
    return ask_kedge(client, "POST", path_of(session_id, "/move"), {"to": to}, fields=told)


def close_session(client: httpx.Client, session_id: str) -> None:
    """Ends it for good."""
    request_json(client, "DELETE", path_of(session_id))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
