"""DiskPause: stops writing to a failing disk for a while."""

from __future__ import annotations

from collections.abc import Callable

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0


class DiskPause:
    """A pause begins with a failure. Each further failure doubles the next pause, up to LONGEST_PAUSE_S; a success
    resets it.

    `clock` returns monotonic seconds. A write that fails may cost another session its place on the disk, and one that
    succeeds takes a session out of host memory. Neither is worth it while the next write may fail.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_s = FIRST_PAUSE_S
        self._ends_s: float | None = None

    @property
    def under_way(self) -> bool:
        return self._ends_s is not None and self._clock() < self._ends_s

    def failed(self) -> None:
        """A write or a read has failed. One that was in flight when the pause began does not make it longer."""
        if self.under_way:
            return
        self._ends_s = self._clock() + self._next_s
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        """A write has succeeded."""
        self._next_s = FIRST_PAUSE_S
        self._ends_s = None
