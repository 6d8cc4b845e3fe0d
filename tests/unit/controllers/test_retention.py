from __future__ import annotations

from controllers.records import LedgerEntry
from controllers.retention import expires_at_s


def _entry(last_used_s: float, timeout_s: float | None = None) -> LedgerEntry:
    return LedgerEntry("s", "", "r", 1, 0, 0, 0.0, last_used_s, timeout_s=timeout_s)


def test_expiry() -> None:
    assert expires_at_s(_entry(3.0), 60.0) == 63.0
    assert expires_at_s(_entry(3.0, timeout_s=5.0), 60.0) == 8.0
