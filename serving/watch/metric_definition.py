"""The form of a metric's definition. The metrics themselves are in serving/watch/definitions.py."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    """Who counts a metric. Replicas and front ends put their name into a label of that name, and of the controller each
    shard its number into the label `shard`. PAGE is the front end that gathers the page; its figures are about the
    whole page and are the same on every front end."""

    REPLICA = "replica"
    INGRESS = "ingress"
    CONTROLLER = "controller"
    PAGE = "page"


@dataclass(frozen=True, slots=True)
class Definition:
    """`name` is without the `_total` that counters have in an exposition. `labels` are without the constant ones; the
    label of the source comes first. `unit` is the base unit of what is counted."""

    name: str
    kind: Kind
    source: Source
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def shown(self) -> str:
        """Its name in an exposition, without the suffixes of a histogram's series."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


def counter(source: Source, name: str, unit: str, text: str, *labels: str) -> Definition:
    return Definition(f"kedge_{name}", Kind.COUNTER, source, unit, _of(source, labels), text)


def gauge(source: Source, name: str, unit: str, text: str, *labels: str) -> Definition:
    return Definition(f"kedge_{name}", Kind.GAUGE, source, unit, _of(source, labels), text)


def histogram(
    source: Source, name: str, unit: str, text: str, buckets: tuple[float, ...], *labels: str
) -> Definition:
    return Definition(f"kedge_{name}", Kind.HISTOGRAM, source, unit, _of(source, labels), text, buckets)


def _of(source: Source, labels: tuple[str, ...]) -> tuple[str, ...]:
    match source:
        case Source.REPLICA | Source.INGRESS:
            return (source.value, *labels)
        case Source.CONTROLLER:
            return ("shard", *labels)
        case Source.PAGE:
            return labels
