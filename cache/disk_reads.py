"""DiskReads: whether a disk still answers reads."""

from __future__ import annotations

from collections.abc import Callable

READ_PATIENCE_S = 60.0


class DiskReads:
    """Counts the reads that are under way. They run one after another, so the first of them has run since it was
    ordered, or since the one before it ended. Once that is READ_PATIENCE_S ago, the disk hangs until a read ends.

    `hangs` changes only in `look` and `ended`, so that it stays the same within a step. `clock` returns monotonic
    seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s = 0.0
        self.count = 0
        self.hangs = False

    @property
    def patience_s(self) -> float | None:
        """Seconds until the next `look` finds that the disk hangs, if no read ends before. None: nothing is read, or it
        hangs already."""
        if not self.count or self.hangs:
            return None
        return max(0.0, self._since_s + READ_PATIENCE_S - self._clock())

    def look(self) -> bool:
        """Returns `hangs`, as of now."""
        if self.patience_s == 0.0:
            self.hangs = True
        return self.hangs

    def began(self) -> None:
        if not self.count:
            self._since_s = self._clock()
        self.count += 1

    def ended(self) -> None:
        """Also one that failed."""
        self._since_s = self._clock()
        self.count -= 1
        self.hangs = False
