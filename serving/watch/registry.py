"""Makes prometheus_client's objects from the definitions, and the text of the metrics.

A process adds the labels `cluster` and `model` when it renders its text. Each process knows both, so no counter needs
them, and whoever gathers texts only concatenates lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from serving.watch.definitions import DEFINITIONS
from serving.watch.metric_definition import Definition, Kind

NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Figure(NamedTuple):
    """The current value of a metric, for these values of its labels without the owner's. For a histogram `value` is the
    sum of the observations, and `counts` are those of its buckets, the last of which has no bound."""

    name: str
    value: float
    labels: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()


ReadFigures = Callable[[], Iterable[Figure]]


class MetricSet:
    """The metrics of one process. `owner` is the value of the label that says who counts, or "" if there is none;
    `constant` are labels that all metrics have."""

    def __init__(self, owner: str, constant: Mapping[str, str] = NO_LABELS) -> None:
        self._own = (owner,) if owner else ()
        self._constant = constant
        self._registry = CollectorRegistry(auto_describe=False)

    def counter(self, name: str, *labels: str) -> Counter:
        """A counter. `labels` are values of the labels after the owner's, if it has any."""
        return self.counters(name, [labels])[labels]

    def counters(self, name: str, values: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Counter]:
        """A counter for each of `values`. All are served as 0 from the start, so that the first increase is visible."""
        made = self.labelled(name)
        return {labels: made.labels(*self._own, *labels) for labels in values}

    def labelled(self, name: str) -> Counter:
        """A counter whose label values, the owner's first, are known only when it is counted up."""
        known = _of(name, Kind.COUNTER)
        return Counter(known.name, known.help, known.labels, registry=self._registry)

    def gauge(self, name: str) -> Gauge:
        known = _of(name, Kind.GAUGE)
        made = Gauge(known.name, known.help, known.labels, registry=self._registry)
        return made.labels(*self._own)

    def histogram(self, name: str) -> Histogram:
        return self.histograms(name).labels(*self._own)

    def histograms(self, name: str) -> Histogram:
        """A histogram whose label values are given when it is observed, as for `labelled`."""
        known = _of(name, Kind.HISTOGRAM)
        return Histogram(known.name, known.help, known.labels, buckets=known.buckets, registry=self._registry)

    def read(self, figures: ReadFigures) -> None:
        """Adds figures that are read each time the text is rendered."""
        self._registry.register(_Figures(figures, self._own))

    def render(self) -> str:
        return generate_latest(_Labelled(self._registry, self._constant)).decode()


class _Figures(Collector):
    def __init__(self, read: ReadFigures, own: tuple[str, ...]) -> None:
        self._read = read
        self._own = own

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily] = {}
        for figure in self._read():
            known = DEFINITIONS[figure.name]
            family = families.get(known.name)
            if family is None:
                family = families[known.name] = _family(known)
            labels = (*self._own, *figure.labels)
            if isinstance(family, HistogramMetricFamily):
                family.add_metric(labels, _buckets(known.buckets, figure.counts), figure.value)
            else:
                family.add_metric(labels, figure.value)
        yield from families.values()


class _Labelled(Collector):
    """Adds the constant labels, and leaves out the creation times of counters, which nobody reads."""

    def __init__(self, registry: CollectorRegistry, constant: Mapping[str, str]) -> None:
        self._registry = registry
        self._constant = constant

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**self._constant, **sample.labels})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric


def _of(name: str, kind: Kind) -> Definition:
    known = DEFINITIONS[name]
    assert known.kind is kind, f"{name} is a {known.kind}"
    return known


def _family(known: Definition) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    match known.kind:
        case Kind.COUNTER:
            return CounterMetricFamily(known.name, known.help, labels=known.labels)
        case Kind.GAUGE:
            return GaugeMetricFamily(known.name, known.help, labels=known.labels)
        case Kind.HISTOGRAM:
            return HistogramMetricFamily(known.name, known.help, labels=known.labels)


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative counts, as an exposition has them."""
    told, total = [], 0
    for bound, count in zip((*map(float, bounds), float("inf")), counts, strict=True):
        total += count
        told.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
    return told
