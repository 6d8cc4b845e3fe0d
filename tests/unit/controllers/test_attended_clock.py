from __future__ import annotations

from manual_clock import ManualClock

from controllers.attended_clock import LATE_AFTER_S, TICK_S, AttendedClock


def test_without_ticks_it_is_the_timer(clock: ManualClock) -> None:
    attended = AttendedClock(clock)
    clock.advance(100.0)
    assert attended() == clock()


def test_with_ticks_in_time_it_runs_as_the_timer_does(clock: ManualClock) -> None:
    attended = AttendedClock(clock)
    for _ in range(100):
        attended.tick()
        clock.advance(TICK_S)
    assert attended() == clock()


def test_a_pause_does_not_count_before_nor_after_the_tick_that_was_due(clock: ManualClock) -> None:
    attended = AttendedClock(clock)
    attended.tick()
    before_s = attended()
    clock.advance(30.0)
    assert attended() - before_s == LATE_AFTER_S
    attended.tick()
    assert attended() - before_s == LATE_AFTER_S
    clock.advance(0.5)
    assert attended() - before_s == LATE_AFTER_S + 0.5


def test_it_never_goes_back(clock: ManualClock) -> None:
    attended = AttendedClock(clock)
    seen = [attended()]
    for pause_s in (0.1, 2.0, 0.0, 11.0, 0.9, 1.1):
        clock.advance(pause_s)
        seen.append(attended())
        attended.tick()
        seen.append(attended())
    assert seen == sorted(seen)
