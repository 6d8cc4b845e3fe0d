from __future__ import annotations

from dataclasses import replace

from controllers.records import LedgerEntry
from controllers.retention import CLOSING_TIMEOUT_S, expires_at_s


def _entry(last_used_s: float, timeout_s: float | None = None) -> LedgerEntry:
    return LedgerEntry("s", "", "r", 1, 0, 0, 0.0, last_used_s, timeout_s=timeout_s)


def test_expiry() -> None:
    assert expires_at_s(_entry(3.0), 60.0) == 63.0
    assert expires_at_s(_entry(3.0, timeout_s=5.0), 60.0) == 8.0


def test_expiry_of_what_is_to_be_closed() -> None:
    closing = replace(_entry(3.0), closes_after="k")
    assert expires_at_s(closing, 2 * CLOSING_TIMEOUT_S) == 3.0 + CLOSING_TIMEOUT_S
    assert expires_at_s(closing, 5.0) == 8.0
