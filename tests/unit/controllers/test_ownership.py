from __future__ import annotations

import pytest
from manual_clock import ManualClock

from controllers.errors import SessionExists, SessionNotFound, StaleEpoch
from controllers.ownership import OwnershipLedger
from controllers.records import SessionRecord, SessionStatus


def _record(session_id: str = "s", replica_id: str = "a", tenant: str = "t") -> SessionRecord:
    return SessionRecord(session_id, tenant, 1, replica_id, created_s=10.0)


def _status(epoch: int = 1, idle_s: float = 0.0, in_turn: bool = False, size_bytes: int = 0) -> SessionStatus:
    return SessionStatus("s", epoch, 0, 0, idle_s, in_turn, size_bytes=size_bytes)


@pytest.fixture
def ledger(clock: ManualClock) -> OwnershipLedger:
    return OwnershipLedger(clock, clock)


def test_open_and_get(ledger: OwnershipLedger) -> None:
    entry = ledger.open(_record())
    assert (entry.replica_id, entry.epoch, entry.tenant, entry.last_used_s) == ("a", 1, "t", 1000.0)
    assert ledger.get("s") == entry
    assert "s" in ledger
    assert len(ledger) == 1
    with pytest.raises(SessionExists):
        ledger.open(_record())


def test_what_was_not_opened_is_not_found(ledger: OwnershipLedger) -> None:
    ledger.open(_record())
    with pytest.raises(SessionNotFound):
        ledger.get("unknown")


def test_transfer_raises_the_epoch_and_fences_the_former_owner(ledger: OwnershipLedger) -> None:
    ledger.open(_record())
    ledger.fence("s", 1, "a")
    moved = ledger.transfer("s", "b")
    assert (moved.replica_id, moved.epoch) == ("b", 2)
    for epoch, replica_id in ((1, "a"), (1, None), (2, "a"), (3, "b")):
        with pytest.raises(StaleEpoch):
            ledger.fence("s", epoch, replica_id)
    ledger.fence("s", 2, "b")
    assert (ledger.count_of("a"), ledger.count_of("b")) == (0, 1)


def test_commit_and_touch_restart_the_idle_clock(ledger: OwnershipLedger, clock: ManualClock) -> None:
    ledger.open(_record())
    clock.advance(5)
    committed = ledger.committed("s", tokens=12, turns=1)
    assert (committed.tokens, committed.turns, committed.last_used_s) == (12, 1, 1005.0)
    clock.advance(5)
    assert ledger.touch("s").last_used_s == 1010.0


def test_reports_count_only_from_the_owner(ledger: OwnershipLedger, clock: ManualClock) -> None:
    ledger.open(_record())
    clock.advance(20)
    assert ledger.report("a", _status(idle_s=5.0, size_bytes=77))
    entry = ledger.get("s")
    assert (entry.last_used_s, entry.size_bytes, entry.in_turn) == (1015.0, 77, False)
    assert ledger.report("a", _status(in_turn=True))
    assert ledger.get("s").in_turn
    assert not ledger.report("b", _status())
    assert not ledger.report("a", _status(epoch=2))
    ledger.expire("s")
    assert not ledger.report("a", _status())


def test_a_late_report_does_not_turn_the_idle_clock_back(ledger: OwnershipLedger, clock: ManualClock) -> None:
    ledger.open(_record())
    clock.advance(20)
    ledger.touch("s")
    ledger.report("a", _status(idle_s=20.0))
    assert ledger.get("s").last_used_s == 1020.0


def test_expire(ledger: OwnershipLedger) -> None:
    ledger.open(_record())
    ledger.open(_record("other"))
    assert ledger.expire("s")
    assert not ledger.expire("s")
    assert ledger.count_of("a") == 1
    assert [entry.session_id for entry in ledger.page()] == ["other"]


def test_rebuilt_from_entries(ledger: OwnershipLedger, clock: ManualClock) -> None:
    ledger.open(_record())
    ledger.open(_record("other", "b"))
    ledger.transfer("s", "b")
    rebuilt = OwnershipLedger(clock, clock, ledger.page())
    assert rebuilt.page() == ledger.page()
    assert rebuilt.count_of("b") == 2
