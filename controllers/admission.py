"""Whether a session may be opened. Pure. (Turns queue inside the engine, which refuses past its own limit.)"""

from __future__ import annotations

from controllers.errors import Overloaded

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


def admit_session(sessions: int, max_sessions: int, next_expiry_s: float | None = None) -> None:
    """Allows one more session. `next_expiry_s`: seconds until an idle session expires, if one will.

    Raises Overloaded, with the estimate when there will be room.
    """
    if sessions < max_sessions:
        return
    wait_s = MAX_RETRY_AFTER_S if next_expiry_s is None else next_expiry_s
    raise Overloaded(f"{sessions} sessions are open, the limit", retry_after_s=_bounded(wait_s))


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
