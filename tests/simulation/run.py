"""Long runs: `python -m tests.simulation.run --seeds A..B [--turns N] [--workers N] [--out FILE.json]`.

Prints each seed that fails with a shortest schedule. Exit status 1 if there was one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.simulation.schedule import make_schedule
from tests.simulation.shrink import shrink
from tests.simulation.simulation import run, undisturbed

SEEDS_AT_ONCE = 50


@dataclass(slots=True)
class Totals:
    """Of the seeds so far. `failed` has what was wrong, by seed."""

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


def play_some(work: tuple[int, int, int]) -> Totals:
    """Seeds from the first to before the second, of so many turns."""
    first, end, turns = work
    totals = Totals()
    with undisturbed():
        for seed in range(first, end):
            outcome = run(make_schedule(seed, turns))
            failed = {seed: list(outcome.violations[:5])} if outcome.violations else {}
            totals.add(Totals(1, outcome.turns, outcome.committed, outcome.steps, outcome.virtual_s, failed))
    return totals


def play_all(first: int, end: int, turns: int, workers: int) -> Iterator[Totals]:
    """Totals of some seeds at a time, as they come."""
    size = max(1, min(SEEDS_AT_ONCE, 1000 // turns))
    work = [(at, min(at + size, end), turns) for at in range(first, end, size)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap_unordered(play_some, work)


def report(totals: Totals, first: int, end: int, turns: int, took_s: float) -> dict[str, object]:
    return {
        "seeds": [first, end],
        "turns_per_seed": turns,
        "commit": _commit(),
        "runs": totals.seeds,
        "turns_done": totals.turns,
        "turns_committed": totals.committed,
        "callbacks": totals.callbacks,
        "virtual_hours": round(totals.virtual_s / 3600, 1),
        "wall_s": round(took_s, 1),
        "violations": {str(seed): what for seed, what in sorted(totals.failed.items())},
    }


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.simulation.run")
    parser.add_argument("--seeds", default="0..1000", help="A..B: from A to before B")
    parser.add_argument("--turns", type=int, default=20, help="of each seed")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON; written as the run goes")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args(words)
    first, end = map(int, args.seeds.split(".."))
    started_s, totals = time.monotonic(), Totals()
    for some in play_all(first, end, args.turns, args.workers):
        totals.add(some)
        for seed, what in some.failed.items():
            print(f"seed {seed}: {what[0]}", flush=True)
        if args.out is not None:
            figures = report(totals, first, end, args.turns, time.monotonic() - started_s)
            args.out.write_text(json.dumps(figures, indent=1) + "\n")
    failed = sorted(totals.failed)
    if failed and not args.no_shrink:
        with undisturbed():
            shortest = shrink(make_schedule(failed[0], args.turns))
            print("\n".join(["a shortest schedule:", *shortest.lines(), *run(shortest).violations]))
    print(f"{totals.seeds} seeds, {totals.turns} turns, {len(failed)} with violations")
    return 1 if failed else 0


def _commit() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
