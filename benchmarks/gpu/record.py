"""The file of figures of one card: each section's latest rows, so a card lent for minutes can be measured in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Row


@dataclass(frozen=True, slots=True)
class SectionRecord:
    """`at` is the UTC time when the section ended; `settings` are the options of its run that were not the default."""

    rows: list[Row]
    seconds: float
    at: str
    settings: dict[str, str]

    @classmethod
    def now(cls, rows: list[Row], seconds: float, settings: dict[str, str]) -> SectionRecord:
        return cls(rows, seconds, datetime.now(UTC).isoformat(timespec="seconds"), settings)


class Record:
    """Sections by name, in the order of `names`. Sections of an earlier run on the same card are kept until they are
    run again; dry runs keep nothing."""

    def __init__(self, names: list[str], dry: bool) -> None:
        self._names, self._dry = names, dry
        self.sections: dict[str, SectionRecord] = {}

    @property
    def card(self) -> str | None:
        return next((row.details["card"] for row in self.rows if row.details.get("card")), None)

    @property
    def rows(self) -> list[Row]:
        return [row for name in self._names if name in self.sections for row in self.sections[name].rows]

    def default_path(self, folder: Path) -> Path | None:
        """None for dry runs and if no card was found."""
        if self._dry or self.card is None:
            return None
        return folder / f"gpu_{re.sub(r'[^a-z0-9]+', '_', self.card.lower()).strip('_')}.json"

    def save(self, path: Path, *, also: Path | None = None) -> None:
        """Writes the record. Sections that were not run now are taken from the existing file, or else from `also`."""
        source = path if path.is_file() else also
        if source is not None:
            self._keep(source)
        content = {
            "card": self.card,
            "dry_run": self._dry,
            "sections": {
                name: {
                    "at": section.at,
                    "seconds": round(section.seconds, 1),
                    "settings": section.settings,
                    "rows": [{**asdict(row), "verdict": row.verdict(self._dry)} for row in section.rows],
                }
                for name, section in sorted(
                    self.sections.items(), key=lambda each: self._names.index(each[0])
                )
            },
        }
        path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")

    def _keep(self, path: Path) -> None:
        if self._dry or not path.is_file():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        if before.get("card") != self.card or before.get("dry_run"):
            return
        for name, section in before["sections"].items():
            if name in self._names and name not in self.sections:
                self.sections[name] = _read(section)


def _read(section: Mapping[str, Any]) -> SectionRecord:
    rows = [
        Row(**{name: value for name, value in row.items() if name != "verdict"}) for row in section["rows"]
    ]
    return SectionRecord(rows, section["seconds"], section["at"], section["settings"])
