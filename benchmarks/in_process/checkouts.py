"""Runs one measurement in this checkout and in another, in turn (A B A B), each time in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 900.0


def measure_in_turn(
    script: str, asked: dict[str, Any], against: Path | None, rounds: int
) -> dict[str, dict[str, float]]:
    """Medians of the figures that `script --worker ASKED` prints as JSON, by checkout: "now", and "before" if `against`
    names another checkout. `script` is the path of a file of this checkout. It is run as a file, and a worker imports
    nothing of benchmarks: the modules that it imports are those of each checkout."""
    checkouts = {"now": Path.cwd()} | ({} if against is None else {"before": against.resolve()})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    for _ in range(rounds):
        for name, folder in checkouts.items():
            found[name].append(_measure(script, asked, folder))
    return {
        name: {figure: statistics.median(each[figure] for each in those) for figure in those[0]}
        for name, those in found.items()
    }


def _measure(script: str, asked: dict[str, Any], folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, script, "--worker", json.dumps(asked)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))
