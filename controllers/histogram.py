"""Figures with labels, and Prometheus' histograms: the controller sends them to the front ends, which publish them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from controllers.wire_record import wire_record


@wire_record
@dataclass(frozen=True, slots=True)
class Measure:
    """A figure. `name` is that of its definition without "kedge_". For a histogram, `value` is the sum of the observed
    values, and `counts` how many fell into each bucket; the last bucket has no upper bound. Other figures have no
    `counts`."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    counts: tuple[int, ...] = ()


class Histogram:
    """A histogram. `bounds` are the buckets' upper bounds (inclusive), ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def measure(self, name: str, *labels: tuple[str, str]) -> Measure:
        return Measure(name, self.total, labels, tuple(self._counts))
