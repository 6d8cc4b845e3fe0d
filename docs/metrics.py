"""Writes docs/metrics.md: every metric, from the definitions that the code makes them of, and what Ray's boards show.

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

from serving.watch.definitions import CONSTANT_LABELS, GROUPS, LABELS, Definition, Source
from serving.watch.ray_llm import FINISHED, NOT_TOLD, NOW_FIGURES, SERVE_REQUESTS, TURN_FIGURES, LLMNames

SERVE = f"ray_{SERVE_REQUESTS}"
PAGE = Path(__file__).resolve().parent / "metrics.md"
HEAD = """# Metrics

What `GET /metrics` serves; `python docs/metrics.py` writes this page. [operations.md](operations.md#metrics) says
how the page is gathered, and has the alerts. A histogram has the series `_bucket`, `_sum` and `_count`. Counters begin
at zero when their process does.

Every metric has the labels `cluster` and `model` beside those in the tables.
"""
NOTES = """## Outcomes of turns

`kedge_turns_total` counts each attempt at a replica once.

| outcome | whose fault | what it is |
|---|---|---|
| `committed` | | in the session log, or ended well without a session |
| `replayed` | | the answer of an earlier try with the same idempotency key |
| `aborted` | | by its client, or its client went away |
| `moved` | | the session is at another replica now, or this one is drained; the turn goes on there |
| `refused` | the client | 400 to 499, but for 429: a field is wrong, the session is busy or unknown |
| `overloaded` | nobody | 429: no room; more replicas are needed, or less load |
| `unavailable` | ours | 503: the engine has stopped, or the session log does not answer |
| `stale` | ours | another replica owns the session: who computed this turn had lost it |
| `store_failed` | ours | computed, and not in the log within `controller.commit_patience_s` |
| `error` | ours | 500: a step failed, or anything that nobody expected |

What no replica takes, as where there is none, is no turn here: `kedge_http_requests_total` with `status="5xx"` has it.

## Orphans

`kedge_controller_orphaned_sessions` is what the ledger and a replica do not agree on, as of its last heartbeat. A
moment's disagreement is usual while sessions move; one that stays is not.

| kind | what it is |
|---|---|
| `stale` | the replica holds it, the ledger gives it to another, or knows it no more; the replica is told to drop it |
| `missing` | the ledger takes the replica to hold it, and it does not |
| `untold` | the replica holds it and the ledger has not heard of that |

`kedge_orphaned_sessions` is one level below: KV in the engine of a session that the replica itself does not know, in
two looks one after another.
"""


RAY = """## Ray's own boards for LLMs

Ray ships Grafana boards "Serve LLM" and "Serve LLM SGLang", which read `ray_vllm_*` and `ray_sglang_*`. With
`metrics.ray_llm_names: vllm` (or `sglang`) each replica tells Ray's metrics what it truly has under those names, beside
the `kedge_*` gauges; the label `model_name` is the model's name. A turn that a replica begins and another one ends
counts at the other. Turns count in Serve's own `ray_serve_deployment_request_counter_total`, too: Serve does not see
them, and the boards take from it which deployments there are, and which process is which replica. A counter is there
once it has counted something: "Aborted Requests / s" is empty until turns are aborted.
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
            part = "in part " if any(name in told for name in asked) else ""
            why = f"{part}empty: {'; '.join(empty)}"
            lines.append(f"| {row.title}: {panel.title} | {why if empty else _told(shown)} |")
    return "\n".join([*lines, ""])


def _told(shown: Iterable[str]) -> str:
    return "; ".join(shown) or "requests of the deployments"


def names_in(query: str) -> list[str]:
    """Of the metrics in a query of Ray's boards."""
    return re.findall(r"\bray_(?:vllm|sglang|serve)_\w+", query)


def _base(name: str) -> str:
    return re.sub(r"_(bucket|count|sum|total)$", "", name)


def why_empty(name: str) -> str:
    """Raises KeyError for what nobody has thought of."""
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
    return " Told by whoever makes the page." if each.source is Source.PAGE else ""


def _labels() -> str:
    lines = ["## Labels", "", "| label | values |", "|---|---|"]
    lines += (f"| `{label}` | {LABELS[label]} |" for label in _used())
    return "\n".join([*lines, ""])


def _used() -> Iterator[str]:
    used = {label for group in GROUPS.values() for each in group for label in each.labels}
    return (label for label in LABELS if label in used or label in CONSTANT_LABELS)


if __name__ == "__main__":
    PAGE.write_text(page())
