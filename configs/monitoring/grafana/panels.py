"""The parts of Grafana dashboards (queries, panels, rows), and the queries that most panels use.

In queries `@c` stands for the labels of the chosen clusters and models, `@r` for those and the chosen replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

SECONDS, BYTES, SHARE, PLAIN = "s", "bytes", "percentunit", "short"


@dataclass(frozen=True, slots=True)
class Query:
    """A query. `rarely` says why it may have no data in a healthy cluster. If it is empty, any load gives data."""

    expr: str
    legend: str
    rarely: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `kind` is one of Grafana's panel types. `width` is in columns of 24."""

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    rows: tuple[Row, ...]


def rate(name: str, labels: str = "@r", by: str = "") -> str:
    total = f"rate({name}{{{labels}}}[$__rate_interval])"
    return f"sum by (cluster, model{', ' + by if by else ''}) ({total})"


def quantile(share: float, name: str, labels: str = "@r", by: str = "") -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', labels, 'le' + (', ' + by if by else ''))})"


def quantiles(
    title: str, text: str, name: str, labels: str = "@r", *, rarely: str = "", width: int = 8
) -> Panel:
    """p50, p95 and p99 of a histogram of seconds."""
    queries = tuple(
        Query(quantile(share, name, labels), f"p{share * 100:g}", rarely) for share in (0.5, 0.95, 0.99)
    )
    return Panel(title, text, SECONDS, queries, width=width)


NO_ERRORS = "nothing has failed"
NO_MOVES = "no session has moved in a turn"
NO_DEATHS = "no replica has died in mid-stream"
NO_DRAINS = "no replica has drained"
NO_STREAMS = "no client streams"
