"""One frame of `kedge top`: the replicas with their pages, the most recently used sessions, and the last events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from serving.cli.commands.wording import counted, duration, size
from serving.cli.top.fitted_table import Column, FittedTable
from serving.cli.top.picture import Picture, Rates


@dataclass(frozen=True, slots=True)
class Account:
    """How an account's pages are drawn. The characters differ, so that colours are not needed."""

    character: str
    style: str


ACCOUNTS: Mapping[str, Account] = MappingProxyType(
    {
        "in_flight": Account("#", "green"),
        "session": Account("=", "blue"),
        "protected": Account("+", "magenta"),
        "cached": Account("-", "cyan"),
        "leaked": Account("!", "bold red"),
        "free": Account(".", "dim"),
    }
)
BAR_WIDTH, LEAST_BAR_WIDTH = 24, 8
LEAST_NAME_WIDTH = 12
REPLICA_FIGURES = MappingProxyType(
    {"used": 0, "run": 0, "wait": 0, "tok/s": 2, "prefill/s": 6, "host": 4, "disk": 5, "sessions": 3}
)
"""Figures of a replica; of those above 0 the highest is left out first where a terminal is too narrow."""
OTHER_LINES = 5
"""Lines of a frame besides the rows of its three tables: the heading, the legend, and empty lines between."""
MOST_EVENTS = 12
EVENT_STYLES = MappingProxyType(
    {"audit": "bold red", "replica_down": "red", "taken_over": "yellow", "demoted": "dim", "promoted": "dim"}
)


def frame(picture: Picture, url: str, height: int | None = None, trouble: str | None = None) -> Group:
    """`height`: how many lines the terminal has; None: no limit. `trouble`: why nothing new comes."""
    parts: list[RenderableType] = [_heading(picture, url)]
    if trouble is None and picture.state is not None:
        trouble = picture.state.get("trouble")
    if trouble is not None:
        parts.append(Text(trouble, style="red", no_wrap=True, overflow="ellipsis"))
    state = picture.state
    if state is None:
        return Group(*parts)
    rows = [row for replica in state["replicas"] for row in _replica_rows(replica, picture.rates(replica))]
    parts += [_legend(), _replica_table(rows), Text()]
    left = None if height is None else max(4, height - OTHER_LINES - len(rows) - len(parts))
    num_events = min(len(picture.events), MOST_EVENTS)
    if left is not None:
        num_events = min(num_events, left // 3)
    sessions = state["sessions"]
    room = None if left is None else max(1, left - num_events - 2)
    parts.append(_session_table(sessions["rows"][:room], int(sessions["total"])))
    if num_events:
        parts += [Text(), *map(_event_line, list(picture.events)[-num_events:])]
    return Group(*parts)


def _heading(picture: Picture, url: str) -> Text:
    state = picture.state
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("kedge top", style="bold")
    if state is None:
        text.append(f"  {url}")
    else:
        clock = time.strftime("%H:%M:%S", time.localtime(float(state["at"])))
        rates = [rate for replica in state["replicas"] if (rate := picture.rates(replica)) is not None]
        said = f"{sum(rate.generated for rate in rates):,.0f}" if rates else "-"
        replicas, sessions = len(state["replicas"]), int(state["sessions"]["total"])
        text.append(f"  {state['model']}  {clock}")
        text.append(f"  {counted(replicas, 'replica')}  {counted(sessions, 'session')}  {said} tok/s  {url}")
    return text


def _legend() -> Text:
    text = Text("KV pages: ", no_wrap=True, overflow="ellipsis")
    for name, account in ACCOUNTS.items():
        text.append(f"{account.character} ", style=account.style).append(f"{name.replace('_', ' ')}  ")
    return text


def _replica_table(rows: Sequence[Sequence[RenderableType]]) -> FittedTable:
    cells = list(zip(*rows, strict=True)) or [()] * (3 + len(REPLICA_FIGURES))
    columns = [
        Column("replica", cells[0]),
        Column("state", cells[1]),
        Column("KV pages", cells[2], least=LEAST_BAR_WIDTH),
    ]
    for (name, spare), figures in zip(REPLICA_FIGURES.items(), cells[3:], strict=True):
        columns.append(Column(name, figures, is_figure=True, spare=spare))
    return FittedTable(columns, 1)


def _replica_rows(replica: Mapping[str, Any], rates: Rates | None) -> list[list[RenderableType]]:
    """A row for each of its pools. A replica that does not answer has a row with its state only."""
    state = str(replica["state"])
    names: list[RenderableType] = [
        str(replica["replica"]),
        Text(state, style="" if state == "up" else "yellow"),
    ]
    figures: list[RenderableType] = [
        _count(replica, "running"),
        _count(replica, "waiting"),
        "-" if rates is None else f"{rates.generated:,.0f}",
        "-" if rates is None else f"{rates.prefill:,.0f}",
        _tier(replica.get("host")),
        _tier(replica.get("disk")),
        _count(replica, "sessions"),
    ]
    rows: list[list[RenderableType]] = []
    for pages in replica["pools"].values():
        used = 1 - (pages["free"] + pages["cached"]) / max(pages["total"], 1)  # cached: evictable
        rows.append([*names, Bar(pages), f"{used:.0%}", *figures])
        names, figures = ["", ""], [""] * len(figures)
    return rows or [[*names, Text("does not answer", style="red"), "?", *figures]]


def _count(replica: Mapping[str, Any], name: str) -> str:
    return f"{replica[name]:,}" if name in replica else "?"


class Bar:
    """A bar that is shorter where the terminal is narrow."""

    def __init__(self, pages: Mapping[str, int]) -> None:
        self._pages = pages

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(LEAST_BAR_WIDTH, BAR_WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield bar(self._pages, min(BAR_WIDTH, options.max_width))


def bar(pages: Mapping[str, int], width: int) -> Text:
    """Pages by account, as shares of the pool. An account with any pages is visible, above all a leak."""
    counts = {name: abs(int(pages.get(name, 0))) for name in ACCOUNTS if name != "free"}
    total = max(int(pages["total"]), 1)
    cells = {name: max(1, round(count * width / total)) if count else 0 for name, count in counts.items()}
    while sum(cells.values()) > width:
        cells[max(cells, key=lambda name: cells[name])] -= 1
    text = Text(no_wrap=True)
    for name, count in {**cells, "free": width - sum(cells.values())}.items():
        text.append(ACCOUNTS[name].character * count, style=ACCOUNTS[name].style)
    return text


def _tier(accounts: Mapping[str, int] | None) -> str:
    if accounts is None:
        return "?"
    if not accounts["budget_bytes"]:
        return "off"
    return f"{accounts['used_bytes'] / accounts['budget_bytes']:.0%}"


def _session_table(rows: Sequence[Mapping[str, Any]], total: int) -> FittedTable:
    named = f"{counted(total, 'session')}{', those used last' if total > len(rows) else ''}"
    columns = [
        Column(_cut(named), [_cut(row["session_id"]) for row in rows], least=LEAST_NAME_WIDTH),
        Column("owner", [str(row["replica_id"] or "-") for row in rows], spare=1),
        Column("epoch", [f"{row['epoch']}" for row in rows], is_figure=True, spare=4),
        Column("tokens", [f"{row['tokens']:,}" for row in rows], is_figure=True),
        Column("KV", [_size_of_kv(row) for row in rows], is_figure=True),
        Column("turns", [f"{row['turns']}" for row in rows], is_figure=True, spare=3),
        Column("idle", [_idle(row) for row in rows], is_figure=True),
    ]
    # Few sessions have a tenant, and older servers do not say which tier has the KV.
    if any(row.get("tier") for row in rows):
        columns.append(Column("tier", [str(row.get("tier") or "") for row in rows], spare=2))
    if any(row.get("tenant") for row in rows):
        columns.append(
            Column("tenant", [_cut(row.get("tenant") or "") for row in rows], least=LEAST_NAME_WIDTH)
        )
    return FittedTable(columns, 2)


def _cut(name: str) -> Text:
    """A name that ends with an ellipsis where its column is narrower."""
    return Text(str(name), no_wrap=True, overflow="ellipsis")


def _idle(row: Mapping[str, Any]) -> Text:
    return Text("in turn", style="green") if row["in_turn"] else Text(duration(float(row["idle_s"])))


def _size_of_kv(row: Mapping[str, Any]) -> str:
    """A session's owner tells the size after a turn: until then pages may be there whose size is not known."""
    return "-" if not row["size_bytes"] and row.get("kv_pages") else size(int(row["size_bytes"]))


def _event_line(event: Mapping[str, Any]) -> Text:
    kind = str(event["kind"])
    clock = time.strftime("%H:%M:%S", time.localtime(float(event["at"])))
    text = Text(f"{clock} ", no_wrap=True, overflow="ellipsis")
    text.append(f"{kind.replace('_', ' '):<12} ", style=EVENT_STYLES.get(kind, ""))
    if event.get("session"):
        text.append(f"{event['session']} ")
    if event.get("rid") is not None:
        text.append(f"· {event['rid']} ")
    places = [str(event[name]) for name in ("replica", "to") if event.get(name)]
    text.append(" → ".join(places))
    if event.get("detail"):
        text.append(f"  {event['detail']}", style="dim")
    return text
