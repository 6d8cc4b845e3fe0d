"""A clock without the time in which its owner stood still. Nobody could reach the owner then, so nobody was silent."""

from __future__ import annotations

from collections.abc import Callable

TICK_S = 0.25
LATE_AFTER_S = 1.0


class AttendedClock:
    """Monotonic seconds, less the spans in which the owner stood still. `timer` returns monotonic seconds.

    The owner calls `tick` every TICK_S on the loop that runs its calls. A tick more than LATE_AFTER_S after the last
    one means that no call could run meanwhile: the process was frozen, the machine had no CPU, or a log did not answer.
    Without ticks the clock is the timer's. Invariant: the clock never goes back.
    """

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
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
        """Seconds of standing still since the last tick. So calls that run before the next tick allow for a pause."""
        if self._ticked_s is None:
            return 0.0
        return max(0.0, now_s - self._ticked_s - LATE_AFTER_S)
