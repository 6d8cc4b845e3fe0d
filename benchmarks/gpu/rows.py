"""What the card report collects, and the one table it prints."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Goal = Literal["at_least", "at_most"]
Outcome = Literal["measured", "failed", "skipped"]

TABLE_CHARACTERS = 11_500
"""Fits where only the last 12,000 characters of the output are kept."""

NOTE_CHARACTERS = 90


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `limit` has the unit of `measured`; `share` is the part of the limit that was reached, or
    the ratio that a goal is about. A row without `target` only informs."""

    section: str
    item: str
    measured: float | None = None
    unit: str = ""
    limit: float | None = None
    share: float | None = None
    target: float | None = None
    goal: Goal = "at_least"
    outcome: Outcome = "measured"
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def verdict(self, dry: bool) -> str:
        if self.outcome != "measured":
            return self.outcome
        if dry:
            return "dry run: not a measurement"
        if self.target is None or self.share is None:
            return "–"
        reached = self.share >= self.target if self.goal == "at_least" else self.share <= self.target
        return "reached" if reached else "MISSED"


def failed(section: str, item: str, reason: str) -> Row:
    return Row(section, item, outcome="failed", note=reason)


def skipped(section: str, item: str, reason: str) -> Row:
    return Row(section, item, outcome="skipped", note=reason)


class RowFile:
    """Rows of one section, written as they come, so that a section that is stopped early keeps what it has."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def read(self) -> list[Row]:
        """Leaves out a last line that was cut off."""
        if not self.path.exists():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(Row(**json.loads(line)))
            except ValueError:
                break
        return rows


def markdown(rows: list[Row], title: str, dry: bool, most: int = TABLE_CHARACTERS) -> str:
    """The table. Until it fits into `most` characters, notes get shorter, then the last rows without a target go."""
    for note_characters in (NOTE_CHARACTERS, 50, 20, 0):
        text = _table(rows, title, dry, note_characters)
        if len(text) <= most:
            return text
    shown = list(rows)
    while len(text) > most:
        rest = [row for row in shown if row.target is None and row.outcome == "measured"]
        if not rest:
            return text[:most]
        shown.remove(rest[-1])
        left_out = f"{title} ({len(rows) - len(shown)} rows are in the JSON only)"
        text = _table(shown, left_out, dry, 0)
    return text


def _table(rows: list[Row], title: str, dry: bool, note_characters: int) -> str:
    lines = [
        f"## {title}",
        "",
        "| item | measured | limit | share | target | verdict | note |",
        "|" + "---|" * 7,
    ]
    for row in rows:
        cells = (
            f"{row.section}: {row.item}",
            _number(row.measured, row.unit),
            _number(row.limit, row.unit),
            _ratio(row.share),
            "" if row.target is None else f"{'≥' if row.goal == 'at_least' else '≤'} {_ratio(row.target)}",
            row.verdict(dry),
            _short(row.note, note_characters),
        )
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    size = abs(value)
    if size >= 1000:
        text = f"{value:,.0f}"
    elif size >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.3g}"
    return f"{text} {unit}".rstrip()


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} ×" if value > 2 else f"{100 * value:.1f} %"


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    return text[: most - 1] + "…" if most else ""
