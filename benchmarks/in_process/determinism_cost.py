"""What `execution.deterministic` costs on a CPU: steps with it beside the same steps without.

    python -m benchmarks.in_process.determinism_cost --json determinism_cost.json

Both are timed in turn (A B A B). With float32 arithmetic they read the same weights at the same addresses. A ratio is
the median, over rounds, of the time without over the time with.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.in_process.cpu_steps import Model, compare, load, median_s, runner_of
from benchmarks.in_process.engine_decode import PAGE_SIZE
from benchmarks.measure import OtherProcesses
from engine.api import SamplingParams
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.models.loader import LoadedModel
from engine.runner.torch_runner import TorchRunner

NUM_PAGES = 1920
STEPS = ((1, 1, 100), (8, 1, 100), (1, 1, 1800), (16, 1, 1800), (1, 16, 1800), (1, 512, 0), (1, 512, 1400))
"""Streams, tokens of each, and tokens before these."""


@dataclass(frozen=True, slots=True)
class Step:
    streams: int
    tokens: int
    history: int

    @property
    def name(self) -> str:
        return f"{self.streams} × {self.tokens} after {self.history:,}"

    def call(self, runner: TorchRunner) -> Callable[[], object]:
        each = -(-(self.history + self.tokens) // PAGE_SIZE)
        pages = np.random.default_rng(1).permutation(NUM_PAGES).astype(np.int32)
        sample = SampleSpec(SamplingParams(temperature=0.0))
        items = [
            BatchItem(
                str(n),
                [5] * self.tokens,
                self.history,
                pages[n * each : (n + 1) * each].copy(),
                False,
                sample,
            )
            for n in range(self.streams)
        ]
        return lambda: runner.execute(ScheduledBatch(items))


def pair(model: Model, variant: str) -> dict[bool, LoadedModel]:
    """The model without the setting, and with it."""
    fixed = load(model, variant, "compiled", deterministic=True)
    if fixed.weights_dtype == torch.float32:
        return {False: replace(fixed, deterministic=None), True: fixed}
    return {False: load(model, variant, "compiled"), True: fixed}  # its matrices round rows


def measure(model: Model, variant: str, rounds: int, round_s: float) -> list[dict[str, Any]]:
    """A row for each step."""
    ways = {fixed: runner_of(loaded, "compiled", NUM_PAGES) for fixed, loaded in pair(model, variant).items()}
    others, rows = OtherProcesses(), []
    for step in (Step(*each) for each in STEPS):
        calls = {fixed: step.call(runner) for fixed, runner in ways.items()}
        for call in calls.values():
            call()
        times_s = [{fixed: median_s(call, round_s) for fixed, call in calls.items()} for _ in range(rounds)]
        rates = [each[False] / each[True] for each in times_s]
        rows.append(
            {
                "model": model.name,
                "variant": variant,
                "threads": model.threads,
                "step": step.name,
                "free_s": statistics.median(each[False] for each in times_s),
                "deterministic_s": statistics.median(each[True] for each in times_s),
                "rate": statistics.median(rates),
                "least_rate": min(rates),
                "most_rate": max(rates),
                "other_processes_cores": others.cores(),
            }
        )
    return rows


def print_table(rows: list[dict[str, Any]], kernels: str) -> None:
    table = Table(title=f"Steps on a CPU with and without execution.deterministic: {kernels} kernels")
    for name in ("model", "weights", "threads", "step", "free ms", "deterministic ms", "rate", "from", "to"):
        table.add_column(name, justify="left" if name in ("model", "weights", "step") else "right")
    for row in rows:
        times = (f"{row[key] * 1e3:.2f}" for key in ("free_s", "deterministic_s"))
        rates = (f"{row[key]:.2f}" for key in ("rate", "least_rate", "most_rate"))
        table.add_row(row["model"], row["variant"], str(row["threads"]), row["step"], *times, *rates)
    Console(width=160).print(table)


def main() -> None:
    compare(__doc__, measure, print_table, rounds=5, round_s=0.3)


if __name__ == "__main__":
    main()
