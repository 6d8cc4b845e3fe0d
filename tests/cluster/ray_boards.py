"""The Grafana dashboards that Ray writes when it starts, and a Prometheus that uses the configuration Ray writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_prometheus import Prometheus

INTERVAL = re.compile(r"scrape_interval: \d+s")
SCRAPE_S = 4
"""A scrape may not take longer than its interval. Ray's agent needs more than a second for its page in a cluster where
many processes have run."""


@dataclass(frozen=True, slots=True)
class BoardQuery:
    """One query of a dashboard. `panel` is the titles of row and panel. In `expression` each variable has its initial
    value, "All" where a board offers it."""

    panel: str
    expression: str


class RayPrometheus(Prometheus):
    """A Prometheus that finds Ray's agents with the `prometheus.yml` in `metrics`, the folder that Ray writes. It
    scrapes more often than Ray sets."""

    def __init__(self, metrics: Path) -> None:
        super().__init__()
        written = (metrics / "prometheus" / "prometheus.yml").read_text()
        assert INTERVAL.search(written)
        self.config.write_text(INTERVAL.sub(f"scrape_interval: {SCRAPE_S}s", written))


def queries_of(metrics: Path, board: str) -> list[BoardQuery]:
    """The queries of one dashboard, for example `serve_llm`."""
    document = json.loads(
        (metrics / "grafana" / "dashboards" / f"{board}_grafana_dashboard.json").read_text()
    )
    values = {
        f"${each['name']}": each["allValue"] if each.get("includeAll") else each["current"]["value"]
        for each in document["templating"]["list"]
        if each["type"] != "datasource"
    }
    return [
        BoardQuery(title, re.sub(r"\$\w+", lambda name: values[name[0]], target["expr"]))
        for title, panel in _panels(document["panels"])
        for target in panel["targets"]
    ]


def _panels(listed: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The panels with their titles. A collapsed row contains its panels; the panels of an open row follow it."""
    row = ""
    for panel in listed:
        if panel["type"] != "row":
            yield f"{row}{panel['title']}", panel
            continue
        row = f"{panel['title']}: "
        for each in panel["panels"]:
            yield f"{row}{each['title']}", each
