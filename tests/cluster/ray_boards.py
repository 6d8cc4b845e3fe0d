"""Ray's own Grafana boards, as it writes them for Grafana when it starts, and a Prometheus that its file configures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_prometheus import SCRAPE_S, Prometheus

INTERVAL = re.compile(r"scrape_interval: \d+s")


@dataclass(frozen=True, slots=True)
class BoardQuery:
    """`panel` is the title, behind that of its row; `expression` with "All" for each variable, as boards begin."""

    panel: str
    expression: str


class RayPrometheus(Prometheus):
    """Finds Ray's agents as `prometheus.yml` of `metrics` says, the folder that Ray writes; scrapes more often."""

    def __init__(self, metrics: Path) -> None:
        super().__init__()
        written = (metrics / "prometheus" / "prometheus.yml").read_text()
        assert INTERVAL.search(written)
        self.config.write_text(INTERVAL.sub(f"scrape_interval: {SCRAPE_S}s", written))


def queries_of(metrics: Path, board: str) -> list[BoardQuery]:
    """Of the board `serve_llm`, say."""
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
    """A row that is folded up has its panels in it, another one before it."""
    row = ""
    for panel in listed:
        if panel["type"] != "row":
            yield f"{row}{panel['title']}", panel
            continue
        row = f"{panel['title']}: "
        for each in panel["panels"]:
            yield f"{row}{each['title']}", each
