"""DiskReads: a disk hangs if no read ends for a while, however many are under way."""

from __future__ import annotations

from cache.disk_reads import READ_PATIENCE_S, DiskReads
from tests.unit.controllers.manual_clock import ManualClock


def test_a_disk_hangs_once_the_read_in_front_has_taken_too_long_and_until_it_ends() -> None:
    clock = ManualClock()
    reads = DiskReads(clock)
    clock.advance(1000)
    assert (reads.look(), reads.patience_s) == (False, None), "nothing is read"
    reads.began()
    clock.advance(READ_PATIENCE_S - 1)
    reads.began()
    assert (reads.look(), reads.patience_s) == (False, 1)
    clock.advance(1)
    assert (reads.hangs, reads.patience_s) == (False, 0), "until somebody looks"
    assert (reads.look(), reads.patience_s) == (True, None)
    reads.ended()
    assert (reads.look(), reads.patience_s) == (False, READ_PATIENCE_S), "the second has just begun"
    reads.ended()
    clock.advance(1000)
    assert (reads.look(), reads.patience_s) == (False, None)


def test_a_disk_whose_reads_end_one_by_one_does_not_hang_however_long_the_last_has_waited() -> None:
    clock = ManualClock()
    reads = DiskReads(clock)
    for _ in range(10):
        reads.began()
    for _ in range(10):
        clock.advance(READ_PATIENCE_S - 1)
        assert not reads.look()
        reads.ended()
