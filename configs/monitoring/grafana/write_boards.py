"""Writes dashboards/*.json for Grafana from the description in boards.py.

python configs/monitoring/grafana/write_boards.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boards import BOARDS
from panels import Board, Panel, Query

HERE = Path(__file__).resolve().parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
CLUSTER = 'cluster=~"$cluster", model=~"$model"'
REPLICA = f'{CLUSTER}, replica=~"$replica"'
VARIABLES = (
    ("cluster", "label_values(kedge_kv_pool_pages, cluster)"),
    ("model", 'label_values(kedge_kv_pool_pages{cluster=~"$cluster"}, model)'),
    ("replica", f"label_values(kedge_kv_pool_pages{{{CLUSTER}}}, replica)"),
)


def expression(query: Query) -> str:
    """The query as the dashboard has it, with Grafana's variables."""
    return query.expr.replace("@r", REPLICA).replace("@c", CLUSTER)


def document(board: Board) -> dict[str, Any]:
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["kedge"],
        "editable": True,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {"title": "Kedge", "type": "dashboards", "tags": ["kedge"], "asDropdown": True, "keepTime": True}
        ],
        "templating": {"list": [_source_variable(), *(_variable(name, query) for name, query in VARIABLES)]},
        "annotations": {"list": [_alerts_as_annotations()]},
        "panels": list(_panels(board)),
    }


def text_of(board: Board) -> str:
    return json.dumps(document(board), indent=1) + "\n"


def path_of(board: Board) -> Path:
    return HERE / "dashboards" / f"{board.uid}.json"


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for row in board.rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        number, top, left = number + 1, top + 1, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left = top + HEIGHT, 0
            place = {"h": HEIGHT, "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **_panel(panel)}
            number, left = number + 1, left + panel.width
        top += HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": stacking,
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": SOURCE,
                "expr": expression(query),
                "legendFormat": query.legend,
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _alerts_as_annotations() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "enable": True,
        "datasource": SOURCE,
        "expr": 'ALERTS{alertstate="firing", cluster=~"$cluster"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{replica}}",
        "iconColor": "red",
    }


def main() -> None:
    for board in BOARDS:
        path_of(board).write_text(text_of(board))


if __name__ == "__main__":
    main()
