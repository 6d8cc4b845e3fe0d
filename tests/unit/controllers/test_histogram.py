"""Counts in buckets."""

from __future__ import annotations

from controllers.histogram import Histogram, Measure


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5, 9.0):
        histogram.observe(value)
    assert histogram.measure("x", ("operation", "commit")) == Measure(
        "x", 16.5, (("operation", "commit"),), (2, 2, 2)
    )
