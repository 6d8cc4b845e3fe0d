"""Writes docs/metrics.md: every metric, from the definitions that the code makes them of, and what Ray's boards show.

python docs/metrics.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from serving.watch.definitions import CONSTANT_LABELS, GROUPS, LABELS, Definition, Source

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


def page() -> str:
    """The whole page, Markdown."""
    parts = [HEAD, *(f"## {title}\n\n{_table(group)}" for title, group in GROUPS.items())]
    return "\n".join([*parts, _labels(), NOTES])


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
