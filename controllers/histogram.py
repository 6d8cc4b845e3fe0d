"""Counts in buckets, as Prometheus has them, and figures with labels: what crosses from the controller to who tells."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from controllers.wire_record import wire_record


@wire_record
@dataclass(frozen=True, slots=True)
class Measure:
    """A figure by the name that its definition has, less "kedge_". Of a histogram `value` is the sum of what was
    observed, and `counts` how often it was in each bucket, the last of which has no bound; else there are none."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    counts: tuple[int, ...] = ()


class Histogram:
    """`bounds` are the buckets' upper ends, ascending; a value that is one belongs to its bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def measure(self, name: str, *labels: tuple[str, str]) -> Measure:
        return Measure(name, self.total, labels, tuple(self._counts))
