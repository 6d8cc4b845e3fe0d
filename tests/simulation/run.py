"""Long runs: `python -m tests.simulation.run --seeds A..B [--turns N] [--workers N] [--out FILE.json]`.

Prints each seed that fails, and a shortest failing schedule. The exit status is 1 if a seed failed. Other ranges in
FILE stay. An interrupted run continues with the first seed that FILE does not have.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.simulation.results import ResultFile, Totals, commit_of_code
from tests.simulation.schedule import make_schedule
from tests.simulation.shrink import shrink
from tests.simulation.simulation import run, undisturbed

SEEDS_AT_ONCE = 50


def play_some(work: tuple[int, int, int]) -> tuple[int, Totals]:
    """Plays the seeds from `first` to before `end`, with `turns` turns each. Returns `end` and the totals."""
    first, end, turns = work
    totals = Totals()
    with undisturbed():
        for seed in range(first, end):
            outcome = run(make_schedule(seed, turns))
            failed = {seed: list(outcome.violations[:5])} if outcome.violations else {}
            totals.add(Totals(1, outcome.turns, outcome.committed, outcome.steps, outcome.virtual_s, failed))
    return end, totals


def play_all(first: int, end: int, turns: int, workers: int) -> Iterator[tuple[int, Totals]]:
    """Plays the seeds in small groups. Yields for each group, in order, the seed after it and its totals."""
    size = max(1, min(SEEDS_AT_ONCE, 1000 // turns))
    work = [(at, min(at + size, end), turns) for at in range(first, end, size)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        yield from pool.imap(play_some, work)


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
    results = None if args.out is None else ResultFile(args.out, first, args.turns, commit_of_code())
    for reached, some in play_all(first, end, args.turns, args.workers):
        totals.add(some)
        for seed, what in some.failed.items():
            print(f"seed {seed}: {what[0]}", flush=True)
        if results is not None:
            results.write(reached, totals, time.monotonic() - started_s)
    failed = sorted(totals.failed)
    if failed and not args.no_shrink:
        with undisturbed():
            shortest = shrink(make_schedule(failed[0], args.turns))
            print("\n".join(["a shortest schedule:", *shortest.lines(), *run(shortest).violations]))
    print(f"{totals.seeds} seeds, {totals.turns} turns, {len(failed)} with violations")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
