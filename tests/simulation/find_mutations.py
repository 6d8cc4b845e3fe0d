"""How soon each mutation is found: `python -m tests.simulation.find_mutations [--most N] [--workers N] [--out FILE]`.

Prints a table and writes it as JSON. Exit status 1 if one was not found.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from tests.simulation.mutations import MUTATIONS, mutated
from tests.simulation.schedule import make_schedule
from tests.simulation.simulation import run, undisturbed

COLLECT_EVERY = 50


def find(name: str, most: int) -> dict[str, Any]:
    """The first seed that fails under the mutation, and how."""
    with undisturbed(), mutated(name):
        for seed in range(most):
            violations = run(make_schedule(seed)).violations
            if violations:
                return {"mutation": name, "seeds": seed + 1, "violation": violations[0][:200]}
            if seed % COLLECT_EVERY == 0:
                gc.collect()
    return {"mutation": name, "seeds": None, "violation": None}


def _find(work: tuple[str, int]) -> dict[str, Any]:
    return find(*work)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.simulation.find_mutations")
    parser.add_argument("--most", type=int, default=2000, help="seeds for each")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="", help="A|B: mutations with one of these in their names")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    names = [name for name in MUTATIONS if any(part in name for part in args.only.split("|"))]
    found: list[dict[str, Any]] = []
    with multiprocessing.get_context("fork").Pool(args.workers) as pool:
        for each in pool.imap_unordered(_find, [(name, args.most) for name in names]):
            found.append(each)
            seeds = "not found" if each["seeds"] is None else f"seed {each['seeds']:>5}"
            print(f"{seeds}  {each['mutation']}: {each['violation']}", flush=True)
            if args.out is not None:
                found.sort(key=lambda entry: names.index(entry["mutation"]))
                args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(each["seeds"] is None for each in found) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
