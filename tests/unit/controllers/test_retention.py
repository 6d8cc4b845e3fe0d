from __future__ import annotations

from controllers.records import LedgerEntry
from controllers.retention import IdleSession, choose_demotions, demotion_order, expires_at_s


def _entry(last_used_s: float, timeout_s: float | None = None) -> LedgerEntry:
    return LedgerEntry("s", "", "r", 1, 0, 0, 0.0, last_used_s, timeout_s=timeout_s)


def test_expiry() -> None:
    assert expires_at_s(_entry(3.0), 60.0) == 63.0
    assert expires_at_s(_entry(3.0, timeout_s=5.0), 60.0) == 8.0


def test_least_recently_used_first_then_larger() -> None:
    sessions = [
        IdleSession("new", 10, 3.0),
        IdleSession("small", 1, 1.0),
        IdleSession("large", 9, 1.0),
        IdleSession("empty", 0, 0.0),
        IdleSession("also-large", 9, 1.0),
    ]
    assert [s.session_id for s in demotion_order(sessions)] == ["also-large", "large", "small", "new"]


def test_as_many_as_needed() -> None:
    sessions = [IdleSession("a", 10, 1.0), IdleSession("b", 10, 2.0), IdleSession("c", 10, 3.0)]
    assert choose_demotions(sessions, 0) == []
    assert choose_demotions(sessions, 10) == ["a"]
    assert choose_demotions(sessions, 11) == ["a", "b"]
    assert choose_demotions(sessions, 1000) == ["a", "b", "c"]
