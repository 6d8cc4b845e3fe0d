"""One frame of `kedge top`: the replicas with their pages, the most recently used sessions, and the last events."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from serving.cli.commands.wording import counted, duration, size
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
        text.append(f"  {state['model']} at {url}  {clock}")
        text.append(f"  {counted(replicas, 'replica')}  {counted(sessions, 'session')}  {said} tok/s")
    return text


def _legend() -> Text:
    text = Text("KV pages: ", no_wrap=True, overflow="ellipsis")
    for name, account in ACCOUNTS.items():
        text.append(f"{account.character} ", style=account.style).append(f"{name.replace('_', ' ')}  ")
    return text


def _replica_table(rows: Sequence[Sequence[RenderableType]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("replica", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("KV pages")
    for name in ("used", "run", "wait", "tok/s", "prefill/s", "host", "disk", "sessions"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


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


def _session_table(rows: Sequence[Mapping[str, Any]], total: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    named = f"{counted(total, 'session')}{', those used last' if total > len(rows) else ''}"
    table.add_column(
        Text(named, no_wrap=True, overflow="ellipsis")
    )  # the only column that a narrow terminal shortens
    table.add_column("owner", no_wrap=True)
    for name in ("epoch", "tokens", "KV", "turns", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    # Few sessions have a tenant, and older servers do not say which tier has the KV.
    others = [name for name in ("tier", "tenant") if any(row.get(name) for row in rows)]
    for name in others:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in rows:
        idle = Text("in turn", style="green") if row["in_turn"] else Text(duration(float(row["idle_s"])))
        cells: list[RenderableType] = [
            Text(str(row["session_id"]), no_wrap=True, overflow="ellipsis"),
            str(row["replica_id"] or "-"),
            f"{row['epoch']}",
            f"{row['tokens']:,}",
            _size_of_kv(row),
            f"{row['turns']}",
            idle,
        ]
        table.add_row(*cells, *(Text(str(row.get(name) or "")) for name in others))
    return table


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
