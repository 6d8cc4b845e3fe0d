"""Time as its owner was there to see it: what it slept through is not held against those who could not reach it."""

from __future__ import annotations

from collections.abc import Callable

TICK_S = 0.25
LATE_AFTER_S = 1.0


class AttendedClock:
    """Monotonic seconds, less the spans in which the owner stood still. `timer` returns monotonic seconds.

    The owner calls `tick` every TICK_S from where its calls run. A tick that is later than LATE_AFTER_S says that no
    call could run meanwhile: a frozen process, a machine without CPU, a log that did not answer. An owner that never
    ticks has the timer's own time. Invariant: the clock never goes back.
    """

    def __init__(self, timer: Callable[[], float], late_after_s: float = LATE_AFTER_S) -> None:
        self._timer = timer
        self._late_after_s = late_after_s
        self._ticked_s: float | None = None
        self._stood_still_s = 0.0

    def tick(self) -> None:
        now_s = self._timer()
        self._stood_still_s += self._overdue_s(now_s)
        self._ticked_s = now_s

    def __call__(self) -> float:
        now_s = self._timer()
        return now_s - self._stood_still_s - self._overdue_s(now_s)

    def _overdue_s(self, now_s: float) -> float:
        """Calls that run before the tick that is due see the pause, too."""
        if self._ticked_s is None:
            return 0.0
        return max(0.0, now_s - self._ticked_s - self._late_after_s)
