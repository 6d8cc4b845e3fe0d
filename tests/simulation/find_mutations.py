"""Finds the run in which each mutation is noticed: `python -m tests.simulation.find_mutations [--most N] [--workers N]
[--only A|B] [--known FILE] [--out FILE]`.

Plays the seeds below N until one fails. Seeds at which FILE, an earlier result, found a mutation come first. Prints a
table and writes it as JSON. The exit status is 1 if a mutation was not found.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.simulation import returning_sessions
from tests.simulation.mutations import MUTATIONS, TRUSTED_SLOTS, mutated
from tests.simulation.schedule import Schedule, make_schedule
from tests.simulation.simulation import run, undisturbed

COLLECT_EVERY = 50


SCHEDULES: dict[str, Callable[[int], Schedule]] = {TRUSTED_SLOTS: returning_sessions.schedule_of}
"""Schedules of mutations that the usual schedules do not show."""


def find(name: str, seeds: Iterable[int]) -> dict[str, Any]:
    """The first of the seeds that fails under the mutation, and its violation. Both are None if no seed fails."""
    schedule_of = SCHEDULES.get(name, make_schedule)
    with undisturbed(), mutated(name):
        for played, seed in enumerate(seeds):
            violations = run(schedule_of(seed)).violations
            if violations:
                return {"mutation": name, "seed": seed, "violation": violations[0][:200]}
            if played % COLLECT_EVERY == 0:
                gc.collect()
    return {"mutation": name, "seed": None, "violation": None}


def _find(work: tuple[str, list[int]]) -> dict[str, Any]:
    return find(*work)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.simulation.find_mutations")
    parser.add_argument("--most", type=int, default=2000, help="seeds for each")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="", help="A|B: mutations with one of these in their names")
    parser.add_argument("--known", type=Path, help="an earlier result: its seeds are tried first")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    names = [name for name in MUTATIONS if any(part in name for part in args.only.split("|"))]
    known = {} if args.known is None else _seeds(json.loads(args.known.read_text()))
    work = [(name, [*known.get(name, ()), *range(args.most)]) for name in names]
    found: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        for each in pool.imap_unordered(_find, work):
            found.append(each)
            where = "not found" if each["seed"] is None else f"seed {each['seed']:>5}"
            print(f"{where}  {each['mutation']}: {each['violation']}", flush=True)
            if args.out is not None:
                found.sort(key=lambda entry: names.index(entry["mutation"]))
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(each["seed"] is None for each in found) else 0


def _seeds(results: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {each["mutation"]: [each["seed"]] for each in results if each.get("seed") is not None}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
