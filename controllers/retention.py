"""When an idle session is past its timeout. Pure policy. (Which KV gives way first is the session cache's affair.)"""

from __future__ import annotations

from controllers.records import LedgerEntry


def expires_at_s(entry: LedgerEntry, default_timeout_s: float) -> float:
    """When the session's idle timeout ends, if nobody uses it. Ignores `in_turn`."""
    timeout_s = default_timeout_s if entry.timeout_s is None else entry.timeout_s
    return entry.last_used_s + timeout_s
