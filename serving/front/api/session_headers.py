"""The session that a request's headers name."""

from __future__ import annotations

from serving.front.api.errors import refusal
from serving.front.api.hidden_sessions import check_not_hidden
from serving.wire.turns import HistoryMode, SessionTurn


def session_turn(
    session_id: str | None,
    key: str | None,
    retries: int | None,
    num_calls: int,
    param: str,
    *,
    mode: HistoryMode | None = None,
    unsaid_mode: HistoryMode = "append",
    expected_turn: int | None = None,
) -> SessionTurn | None:
    """The turn in the session that the headers name; None without a session. Then a key has no use, because a retry
    repeats nothing. If there is a key, the count of retries has no use. `unsaid_mode`: the mode if the header does not
    say one. Raises ServiceError."""
    if session_id is None:
        for name, said in (("x-session-mode", mode), ("x-session-turn", expected_turn)):
            if said is not None:
                raise refusal(f"{name}: says nothing without x-session-id.", name)
        return None
    check_not_hidden(session_id, "x-session-id")
    if num_calls > 1:
        raise refusal(f"{param}: a session takes one generation at a time.", param)
    return SessionTurn(
        session_id,
        idempotency_key=key,
        retries=retries if key is None else None,
        expected_turn=expected_turn,
        mode=mode or unsaid_mode,
    )


def check_no_session(session_id: str | None, mode: HistoryMode | None, expected_turn: int | None) -> None:
    """For counts of a prompt's tokens, which know no sessions. Raises ServiceError."""
    headers = (("x-session-id", session_id), ("x-session-mode", mode), ("x-session-turn", expected_turn))
    for name, said in headers:
        if said is not None:
            raise refusal(
                f"{name}: only what is sent is counted, without a session's history. Send all of it, without {name}.",
                name,
            )
