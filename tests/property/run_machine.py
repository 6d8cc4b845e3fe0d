"""Runs the state machine for long: `python -m tests.property.run_machine --steps 200000 --seed 1 --output x.json`.

A step is one executed rule; its several engine steps are not counted. A failure prints Hypothesis' smallest example.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.property.session_machine import SessionMachine, checks_made, events_seen, num_steps, rules_run

BATCH_EXAMPLES = 50
STEPS_PER_EXAMPLE = 80


def run_batch(seed: int, examples: int = BATCH_EXAMPLES, steps: int = STEPS_PER_EXAMPLE) -> None:
    """One Hypothesis run of `examples` examples with at most `steps` rules each. The seed makes it repeatable."""

    class Seeded(SessionMachine):
        """A class of its own, because Hypothesis keeps the seed at the class. Other runs in this process have other
        seeds."""

    hypothesis.seed(seed)(Seeded)
    run_state_machine_as_test(
        Seeded,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def figures(seed: int, next_seed: int, wall_s: float, cpu_s: float) -> dict[str, Any]:
    return {
        "steps": num_steps(),
        "checks": checks_made[0],
        "failures": 0,
        "seeds": [seed, next_seed - 1],
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "python": platform.python_version(),
        "hypothesis": hypothesis.__version__,
        "rules": dict(rules_run.most_common()),
        "events": dict(events_seen.most_common()),
    }


def run(steps: int, seed: int) -> dict[str, Any]:
    """Runs batches with the seeds `seed`, `seed + 1`, ... until `steps` rules were executed."""
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    next_seed = seed
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("rules executed", total=steps)
        while num_steps() < steps:
            progress.update(task, description=f"seed {next_seed}")
            run_batch(next_seed)
            next_seed += 1
            progress.update(task, completed=num_steps())
            if not progress.console.is_terminal:
                progress.console.print(f"{num_steps()} of {steps} rules, next seed {next_seed}")
    return figures(seed, next_seed, time.monotonic() - started_s, time.process_time() - started_cpu_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    logging.getLogger("kedge").setLevel(logging.CRITICAL)  # failing copies are part of the test
    result = run(options.steps, options.seed)
    table = Table(
        "what", "how often", title=f"{result['steps']} steps, {result['checks']} checks, no failure"
    )
    for kind in ("rules", "events"):
        for name, count in result[kind].items():
            table.add_row(name, str(count))
        table.add_section()
    Console().print(table)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
