"""The cluster controller's counters, and how long its log takes. Names are those of serving/watch/definitions.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from controllers.errors import StoreError
from controllers.histogram import Histogram, Measure

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
    "moved_by_operators",
    "unheard_owners",
    "turns_committed",
    "turns_refused",
    "commits_failed",
    "replicas_lost",
)
MOVES = ("transfers", "rebalanced", "drained", "moved_by_operators", "unheard_owners")
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
STORE_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
GROUP_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DRAIN_BUCKETS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)


class ClusterStats:
    """Counts since the controller started. `timer` returns monotonic seconds."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self._timer = timer
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._took_s = {operation: Histogram(STORE_BUCKETS_S) for operation in STORE_OPERATIONS}
        self._failed = dict.fromkeys(STORE_OPERATIONS, 0)
        self._groups = Histogram(GROUP_BUCKETS)
        self._drains_s = Histogram(DRAIN_BUCKETS_S)

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def group_written(self, num_turns: int) -> None:
        self._groups.observe(num_turns)

    def replica_left(self, after_s: float) -> None:
        """Notes that a draining replica has said farewell, `after_s` after its drain began."""
        self._drains_s.observe(after_s)

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Counts and times a store operation, also if it raises."""
        started_s = self._timer()
        try:
            yield
        except StoreError:
            self._failed[operation] += 1
            raise
        finally:
            self._took_s[operation].observe(self._timer() - started_s)

    def measures(self) -> Iterator[Measure]:
        """The counters, and the figures by store operation or in buckets."""
        for name, value in self._counts.items():
            yield Measure(f"{'ownership' if name in MOVES else 'controller'}_{name}", float(value))
        for operation, took_s in self._took_s.items():
            yield took_s.measure("controller_store_seconds", ("operation", operation))
            yield Measure(
                "controller_store_errors", float(self._failed[operation]), (("operation", operation),)
            )
        yield self._groups.measure("controller_commit_group_turns")
        yield self._drains_s.measure("controller_drain_seconds")
