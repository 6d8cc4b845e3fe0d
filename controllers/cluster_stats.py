"""Counters and store latencies of the cluster controller, as a plain dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

COUNTERS = (
    "sessions_opened",
    "sessions_forked",
    "sessions_closed",
    "sessions_expired",
    "sessions_claimed",
    "sessions_taken_over",
    "transfers",
    "rebalanced",
    "drained",
    "turns_committed",
    "turns_refused",
    "commits_failed",
)
STORE_OPERATIONS = (
    "open",
    "fork",
    "assign",
    "touch",
    "load",
    "notes",
    "commit",
    "close",
    "close_after",
    "find",
    "claim",
    "changes",
)


class ClusterStats:
    """Counts since the controller started. `timer` returns monotonic seconds."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._calls = dict.fromkeys(STORE_OPERATIONS, 0)
        self._busy_s = dict.fromkeys(STORE_OPERATIONS, 0.0)
        self._longest_s = dict.fromkeys(STORE_OPERATIONS, 0.0)

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Counts and times a store operation, also one that raises."""
        started_s = self._timer()
        try:
            yield
        finally:
            took_s = self._timer() - started_s
            self._calls[operation] += 1
            self._busy_s[operation] += took_s
            self._longest_s[operation] = max(self._longest_s[operation], took_s)

    def figures(self) -> dict[str, float]:
        """`<counter>_total`; per store operation `store_<operation>_total`, `_seconds_total`, `_seconds_max`."""
        figures = {f"{name}_total": float(value) for name, value in self._counts.items()}
        for operation in STORE_OPERATIONS:
            figures[f"store_{operation}_total"] = float(self._calls[operation])
            figures[f"store_{operation}_seconds_total"] = self._busy_s[operation]
            figures[f"store_{operation}_seconds_max"] = self._longest_s[operation]
        return figures
