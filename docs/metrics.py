"""Writes docs/metrics.md: every metric, from the definitions that the code uses, and what Ray's boards show.

python docs/metrics.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ray.dashboard.modules.metrics.dashboards.common import DashboardConfig
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config
from ray.dashboard.modules.metrics.dashboards.serve_llm_sglang_dashboard_panels import (
    serve_llm_sglang_dashboard_config,
)
from wrap import wrapped

from serving.watch.definitions import CONSTANT_LABELS, GROUPS, LABELS
from serving.watch.metric_definition import Definition, Source
from serving.watch.ray_llm import FINISHED, NOT_TOLD, NOW_FIGURES, SERVE_REQUESTS, TURN_FIGURES, LLMNames

SERVE = f"ray_{SERVE_REQUESTS}"
PAGE = Path(__file__).resolve().parent / "metrics.md"
HEAD = """# Metrics

This page lists the metrics that `GET /metrics` serves. `python docs/metrics.py` writes it.
[Metrics and alerts](operations/alerts.md) says which to look at first, and how they are gathered. A histogram has
the series `_bucket`, `_sum` and `_count`. A counter begins at zero when its process starts.

Every metric has the labels `cluster` and `model`, in addition to those in the tables.
"""
NOTES = """## Outcomes of turns

`kedge_turns_total` counts each attempt at a replica once.

| outcome | whose fault | meaning |
|---|---|---|
| `committed` | | the turn is in the session log, or it has no session and ended well |
| `replayed` | | the client got the answer of an earlier try with the same idempotency key |
| `aborted` | | the client aborted the turn, or went away |
| `moved` | | the session has moved to another replica, or this replica drains; the turn is sent to another replica |
| `refused` | the client | 400 to 499, except 429: a field is wrong, or the session is busy or unknown |
| `overloaded` | nobody | 429: there is no room; add replicas or reduce the load |
| `unavailable` | ours | 503: the engine has stopped, or the session log does not answer |
| `stale` | ours | another replica owns the session: the replica that computed this turn had lost it |
| `store_failed` | ours | the turn was computed, but was not in the log within `controller.commit_patience_s` |
| `error` | ours | 500: a step failed, or something unexpected happened |

A request that no replica accepts, for example because there is none, is not counted here.
`kedge_http_requests_total` with `status="5xx"` counts it.

## Orphans

`kedge_controller_orphaned_sessions` counts the sessions on which the ledger and a replica disagree, as of the replica's
last heartbeat. While sessions move, a short disagreement is normal. A lasting one is not.

| kind | meaning |
|---|---|
| `stale` | the replica holds a session that is closed or owned elsewhere, a heartbeat after it was told to drop it |
| `missing` | the ledger counts the session as held by the replica, but the replica does not hold it |
| `untold` | the replica holds the session, but has not reported it to the ledger |

`kedge_orphaned_sessions` is about the level below: it counts the sessions that have KV in a replica's engine, although
the replica did not know them in two checks in a row.
"""


RAY = """## Ray's own boards for LLMs

Ray ships the Grafana boards "Serve LLM" and "Serve LLM SGLang", which read `ray_vllm_*` and `ray_sglang_*`. With
`metrics.ray_llm_names: vllm` (or `sglang`), each replica reports its own figures under those names to Ray's metrics, in
addition to the `kedge_*` gauges. The label `model_name` is the model's name. If another replica takes over a turn, the
turn counts at that replica.

Turns also count in Serve's own `ray_serve_deployment_request_counter_total`. Serve itself does not see them, and the
boards read from that counter which deployments there are, and which process is which replica.

A counter exists only after it has counted something, so "Aborted Requests / s" is empty until a turn is aborted.

### Ray's dashboard

Ray's dashboard (`http://127.0.0.1:8265`) shows boards of a Grafana that reads a Prometheus that scrapes Ray. When Ray
starts, it writes the configuration of both into its session's folder:

1. Say where both will be, before `kedge serve` (or `ray start`): `export RAY_PROMETHEUS_HOST=http://127.0.0.1:9091
   RAY_GRAFANA_HOST=http://127.0.0.1:3001`.
2. `kedge serve my.yaml`, with `metrics: {ray_llm_names: vllm}` in `args`.
3. `prometheus --config.file=/tmp/ray/session_latest/metrics/prometheus/prometheus.yml
   --web.listen-address=127.0.0.1:9091 --storage.tsdb.path=.kedge/ray-prometheus`. Without the last option, Debian's
   Prometheus writes into the folder of its own service.
4. `GF_SERVER_HTTP_PORT=3001 grafana-server --homepath /usr/share/grafana --config
   /tmp/ray/session_latest/metrics/grafana/grafana.ini web`. Debian has no Grafana; get it from its makers.
5. Open the dashboard: "Metrics", and "Serve" with a few panels of Ray's boards for Serve. The boards for LLMs are on
   none of its pages: they are in Grafana's folder "Ray", as "Serve LLM Dashboard" and "Serve LLM SGLang Dashboard".

Panels show data after half a minute under load. Kedge's own gauges are in Ray's metrics in any case. On Ray's boards
for Serve:

- Requests are counted of the deployment `Ingress`. `LLMReplica` has little but its number of replicas, since turns
  reach them by connections of Kedge's own.
- The panels of gRPC and of multiplexed models stay empty, as Kedge uses neither.
- "Error QPS per deployment" and "per replica" count requests whose clients went away. Errors that Kedge answers are in
  "Error QPS per application".
- "Ongoing HTTP Requests" and "Scheduling Tasks" come and go: Ray drops a gauge that is not set for 20 s.

"Total QPS" of the boards for LLMs counts a request at the front end and its turn at the replica; with `LLMReplica` for
"deployment" it counts turns only.
"""
BOARDS: Mapping[LLMNames, DashboardConfig] = {
    "vllm": serve_llm_dashboard_config,
    "sglang": serve_llm_sglang_dashboard_config,
}


def page() -> str:
    """The whole page, Markdown."""
    parts = [HEAD, *(f"## {title}\n\n{_table(group)}" for title, group in GROUPS.items())]
    return wrapped("\n".join([*parts, _labels(), NOTES, RAY, *map(_board, BOARDS)]))


def _board(names: LLMNames) -> str:
    told = {f"ray_{each.name}": each.source for each in (*TURN_FIGURES[names], *NOW_FIGURES[names])}
    told |= {f"ray_{FINISHED}": "`kedge_finished_turns_total`"} if names == "vllm" else {}
    lines = [f"### `ray_{names}_*`", "", "| panel | shows |", "|---|---|"]
    for row in BOARDS[names].rows:
        for panel in row.panels:
            asked = dict.fromkeys(_base(name) for target in panel.targets for name in names_in(target.expr))
            asked.pop(SERVE, None)
            empty = dict.fromkeys(why_empty(name) for name in asked if name not in told)
            shown = dict.fromkeys(told.get(name, "") for name in asked)
            part = "partly " if any(name in told for name in asked) else ""
            why = f"{part}empty: {'; '.join(empty)}"
            lines.append(f"| {row.title}: {panel.title} | {why if empty else _told(shown)} |")
    return "\n".join([*lines, ""])


def _told(shown: Iterable[str]) -> str:
    return "; ".join(shown) or "requests of the deployments"


def names_in(query: str) -> list[str]:
    """The names of the metrics in a query of Ray's boards."""
    return re.findall(r"\bray_(?:vllm|sglang|serve)_\w+", query)


def _base(name: str) -> str:
    return re.sub(r"_(bucket|count|sum|total)$", "", name)


def why_empty(name: str) -> str:
    """Why no metric of this name is exported. Raises StopIteration for a name without a reason."""
    return next(why for start, why in NOT_TOLD.items() if name.startswith(f"ray_{start}"))


def _table(group: tuple[Definition, ...]) -> str:
    lines = ["| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
    lines += (
        f"| `{each.shown}` | {each.kind} | {each.unit} | {', '.join(each.labels)} | {each.help}{_note(each)} |"
        for each in group
    )
    return "\n".join([*lines, ""])


def _note(each: Definition) -> str:
    if each.buckets:
        return f" Buckets: {', '.join(f'{bound:g}' for bound in each.buckets)}."
    return " The front end that makes the page reports it." if each.source is Source.PAGE else ""


def _labels() -> str:
    lines = ["## Labels", "", "| label | values |", "|---|---|"]
    lines += (f"| `{label}` | {LABELS[label]} |" for label in _used())
    return "\n".join([*lines, ""])


def _used() -> Iterator[str]:
    used = {label for group in GROUPS.values() for each in group for label in each.labels}
    return (label for label in LABELS if label in used or label in CONSTANT_LABELS)


if __name__ == "__main__":
    PAGE.write_text(page())
