from __future__ import annotations

from controllers.records import LedgerEntry
from controllers.retention import IdleSession, choose_demotions, demotion_order, past_timeout


def _entry(last_used_s: float, timeout_s: float | None = None) -> LedgerEntry:
    return LedgerEntry("s", "", "r", 1, 0, 0, 0.0, last_used_s, timeout_s=timeout_s)


def test_past_timeout() -> None:
    assert not past_timeout(_entry(0.0), now_s=60.0, default_timeout_s=60.0)
    assert past_timeout(_entry(0.0), now_s=60.1, default_timeout_s=60.0)
    assert not past_timeout(_entry(0.0), now_s=60.1, default_timeout_s=60.0, grace_s=1.0)
    assert past_timeout(_entry(0.0, timeout_s=5.0), now_s=6.0, default_timeout_s=60.0)
    assert not past_timeout(_entry(0.0, timeout_s=100.0), now_s=61.0, default_timeout_s=60.0)


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
