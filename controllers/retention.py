"""How long a session may be idle. Pure policy. (The session cache decides which KV is evicted first.)"""

from __future__ import annotations

from controllers.records import LedgerEntry

CLOSING_TIMEOUT_S = 60.0
"""The idle timeout of a session that is to be closed after a turn. If the owner is lost, that turn has this long to
find another one."""


def idle_timeout_s(timeout_s: float, *, closing: bool) -> float:
    """The idle timeout of a session that was opened with `timeout_s`."""
    return min(timeout_s, CLOSING_TIMEOUT_S) if closing else timeout_s


def expires_at_s(entry: LedgerEntry, default_timeout_s: float) -> float:
    """When the session's idle timeout ends, if nobody uses it. Ignores `in_turn`."""
    timeout_s = default_timeout_s if entry.timeout_s is None else entry.timeout_s
    return entry.last_used_s + idle_timeout_s(timeout_s, closing=entry.closes_after is not None)
