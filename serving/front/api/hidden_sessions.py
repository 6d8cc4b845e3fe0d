"""Hidden sessions: those of stored responses and of conversations. Clients name these by ids of their own, and only the
calls on responses and conversations add turns to their sessions."""

from __future__ import annotations

import re

from serving.front.api.errors import refusal

RESPONSE = "resp-"
CONVERSATION = "conv-"
HEX = "[0-9a-f]{32}"
"""What follows in a hidden session's name. A client may give its own sessions other names that begin like that."""
_HIDDEN = re.compile(f"({RESPONSE}|{CONVERSATION}){HEX}")


def check_not_hidden(session_id: str, param: str) -> None:
    """Refuses a client's turn in a hidden session. `param` is the field that names the session. Raises ServiceError."""
    if _HIDDEN.fullmatch(session_id):
        raise refusal(
            f"{param}: {session_id!r} is the session of a response or a conversation, to which only /v1/responses and "
            "/v1/conversations add. Name another one.",
            param,
        )
