"""The file of results: ranges of seeds. Each has the number of turns per seed, the commit that played it, and its sums.

A range that continues an interrupted range of the same commit is joined to it.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Totals:
    """Sums over the seeds so far. `failed` has the violations, by seed."""

    seeds: int = 0
    turns: int = 0
    committed: int = 0
    callbacks: int = 0
    virtual_s: float = 0.0
    failed: dict[int, list[str]] = field(default_factory=dict)

    def add(self, other: Totals) -> None:
        self.seeds += other.seeds
        self.turns += other.turns
        self.committed += other.committed
        self.callbacks += other.callbacks
        self.virtual_s += other.virtual_s
        self.failed = self.failed | other.failed


class ResultFile:
    """A file of which one range grows, from seed `first`. The other ranges stay. `commit` is that of the code that
    plays."""

    def __init__(self, path: Path, first: int, turns_per_seed: int, commit: str) -> None:
        self._path = path
        self._ranges: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
        self._first = first
        self._turns_per_seed = turns_per_seed
        self._commit = commit
        self._before, self._before_s = Totals(), 0.0
        for known in self._ranges:
            if (known["seeds"][1], known["turns_per_seed"], known["commit"]) == (
                first,
                turns_per_seed,
                commit,
            ):
                self._ranges.remove(known)
                self._first = known["seeds"][0]
                self._before, self._before_s = _totals(known), known["wall_s"]
                break

    def write(self, reached: int, totals: Totals, took_s: float) -> None:
        """Writes that all seeds from the first to before `reached` were played. `totals` are the sums of this process's
        seeds."""
        whole = Totals()
        whole.add(self._before)
        whole.add(totals)
        grown = {
            "seeds": [self._first, reached],
            "turns_per_seed": self._turns_per_seed,
            "commit": self._commit,
            "runs": whole.seeds,
            "turns_done": whole.turns,
            "turns_committed": whole.committed,
            "callbacks": whole.callbacks,
            "virtual_hours": round(whole.virtual_s / 3600, 4),
            "wall_s": round(self._before_s + took_s, 1),
            "violations": {str(seed): what for seed, what in sorted(whole.failed.items())},
        }
        beside = self._path.with_name(f"{self._path.name}.part")
        beside.write_text(json.dumps([*self._ranges, grown], indent=1) + "\n")
        beside.replace(self._path)


def commit_of_code() -> str:
    """The commit of the code, with `-dirty` at the end if files were changed since."""
    words = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _totals(known: dict[str, Any]) -> Totals:
    return Totals(
        known["runs"],
        known["turns_done"],
        known["turns_committed"],
        known["callbacks"],
        known["virtual_hours"] * 3600,
        {int(seed): what for seed, what in known["violations"].items()},
    )
