"""Steps on a CPU in the compiled kernels beside torch's operators: decode and prefill, of one and of eight streams.

    python -m benchmarks.in_process.cpu_steps --json cpu_steps.json

Both hold the same random weights and are timed in turn (A B A B). The floor of a decode step is the bytes of weights
that it reads, over the bandwidth of a copy that is measured before each round with as many threads. A step cannot be
faster than this unless a cache holds the weights, as it does those of the small model.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.in_process.engine_decode import EMBEDDED, PAGE_SIZE, step_call
from benchmarks.in_process.weight_bandwidth import MODEL, VARIANTS
from benchmarks.measure import OtherProcesses, copy_bandwidth, save_record
from engine.api import SamplingParams
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.build_runner import build_runner
from engine.cpu.library import NoKernels, find_kernels
from engine.models.config import parse_spec
from engine.models.linear import linear_factory
from engine.models.loader import LoadedModel, load_model
from engine.models.tensor_shapes import tensor_shapes
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ExecutionSettings, ModelSettings

WAYS = ("torch", "compiled")
CONTEXT_LEN = 100
PROMPT_LEN = 512
STREAMS = (1, 8)
NUM_PAGES = 512


@dataclass(frozen=True, slots=True)
class Model:
    """A model to time. `threads` is the number it is best served with on two cores."""

    name: str
    config: dict[str, Any]
    threads: int

    @property
    def parameters(self) -> int:
        """The parameters that a decode step reads. If the embedding is also the head, it counts."""
        shapes = tensor_shapes(parse_spec(self.config))
        unread = set() if self.config["tie_word_embeddings"] else {"model.embed_tokens.weight"}
        return sum(math.prod(shape) for name, shape in shapes.items() if name not in unread)


@dataclass(frozen=True, slots=True)
class Case:
    """A step with `tokens` of each of the streams, after `history`."""

    what: str
    streams: int
    tokens: int
    history: int

    def call(self, runner: TorchRunner) -> Callable[[], object]:
        if self.tokens == 1:
            return step_call(runner, self.streams, self.history)
        each = self.tokens // PAGE_SIZE
        spec = SampleSpec(SamplingParams(temperature=0.0))
        pages = np.arange(self.streams * each, dtype=np.int32).reshape(self.streams, each)
        items = [BatchItem(str(n), [5] * self.tokens, 0, pages[n], True, spec) for n in range(self.streams)]
        return lambda: runner.execute(ScheduledBatch(items))


CASES = [
    *(Case("decode", streams, 1, CONTEXT_LEN) for streams in STREAMS),
    *(Case("prefill", streams, PROMPT_LEN // streams, 0) for streams in STREAMS),
]


def load(model: Model, variant: str, way: str, *, deterministic: bool = False) -> LoadedModel:
    checkpoint, dtype, _ = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.config | {"dtype": checkpoint}))
        settings = ModelSettings(
            folder, load_format="dummy", dtype=dtype, device="cpu", num_threads=model.threads
        )
        weights = torch.float32 if dtype == "float32" else torch.bfloat16
        plain = linear_factory(weights) if way == "torch" else None
        return load_model(settings, plain, deterministic=deterministic)


def runner_of(loaded: LoadedModel, way: str, num_pages: int = NUM_PAGES) -> TorchRunner:
    execution = ExecutionSettings(attention="torch" if way == "torch" else "cpu")
    runner = build_runner(loaded, CacheSettings(PAGE_SIZE, num_pages), execution=execution)
    assert isinstance(runner, TorchRunner)
    runner._pool.full.kv_LJKSD.zero_()
    return runner


def measure(model: Model, variant: str, rounds: int, round_s: float) -> list[dict[str, Any]]:
    """A row for each case: medians over rounds, and the best of them."""
    runners, load_s = dict[str, TorchRunner](), dict[str, float]()
    for way in WAYS:
        begun_s = time.perf_counter()
        runners[way] = runner_of(load(model, variant, way), way)
        load_s[way] = time.perf_counter() - begun_s
    read_bytes = model.parameters * VARIANTS[variant][2]
    calls = {(case, way): case.call(runners[way]) for case in CASES for way in WAYS}
    times_s: dict[tuple[Case, str], list[float]] = {key: [] for key in calls}
    floors_s: list[float] = []
    others = OtherProcesses()
    for call in calls.values():
        call()
    for _ in range(rounds):
        floors_s.append(read_bytes / copy_bandwidth(4))
        for key, call in calls.items():
            times_s[key].append(median_s(call, round_s))
    rows = []
    for case in CASES:
        step_s = {way: statistics.median(times_s[case, way]) for way in WAYS}
        tokens = case.streams * case.tokens
        rows.append(
            {
                "model": model.name,
                "variant": variant,
                "threads": model.threads,
                "what": case.what,
                "streams": case.streams,
                "tokens": tokens,
                **{f"{way}_step_s": step_s[way] for way in WAYS},
                **{f"{way}_tokens_per_s": tokens / step_s[way] for way in WAYS},
                **{f"{way}_best_tokens_per_s": tokens / min(times_s[case, way]) for way in WAYS},
                "times_as_fast": step_s["torch"] / step_s["compiled"],
                "floor_s": statistics.median(floors_s) if case.what == "decode" else None,
                **{f"{way}_load_s": load_s[way] for way in WAYS},
                "other_processes_cores": others.cores(),
                "rounds": {way: times_s[case, way] for way in WAYS},
                "floors_s": floors_s,
            }
        )
    return rows


def median_s(call: Callable[[], object], for_s: float) -> float:
    times_s: list[float] = []
    end_s = time.perf_counter() + for_s
    while len(times_s) < 2 or time.perf_counter() < end_s:
        begun_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s)


def print_table(rows: list[dict[str, Any]], variant: str) -> None:
    table = Table(title=f"Steps on a CPU: {variant} kernels beside torch's operators")
    for name in (
        "model", "weights", "threads", "step", "torch tokens/s", "best", "compiled tokens/s", "best ", "times",
        "floor ms", "compiled / floor", "other cores",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("model", "weights", "step") else "right")
    for row in rows:
        floor_s = row["floor_s"]
        table.add_row(
            row["model"],
            row["variant"],
            str(row["threads"]),
            f"{row['what']}, {row['streams']} × {row['tokens'] // row['streams']}",
            *(f"{row[f'{way}_{which}tokens_per_s']:,.1f}" for way in WAYS for which in ("", "best_")),
            f"{row['times_as_fast']:.2f}",
            "" if floor_s is None else f"{floor_s * 1e3:.2f}",
            "" if floor_s is None else f"{row['compiled_step_s'] / floor_s:.2f}",
            f"{row['other_processes_cores'] or 0.0:.2f}",
        )
    Console(width=180).print(table)


def compare(
    what: str | None,
    measure: Callable[[Model, str, int, float], list[dict[str, Any]]],
    print_table: Callable[[list[dict[str, Any]], str], None],
    rounds: int,
    round_s: float,
) -> None:
    """The command line of a script that measures both models with each kind of weights. `what` is its docstring."""
    parser = argparse.ArgumentParser(description=(what or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--round-s", type=float, default=round_s, help="of each way and step in a round")
    parser.add_argument("--model", choices=["5 M", "505 M"], action="append", help="both if left out")
    parser.add_argument("--threads", type=int, help="for both models, in place of 1 and 2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kernels = find_kernels()
    if isinstance(kernels, NoKernels):
        raise SystemExit(f"nothing to compare: {kernels.reason}")
    small = json.loads((EMBEDDED / "config.json").read_text())
    models = [Model("5 M", small, args.threads or 1), Model("505 M", MODEL, args.threads or 2)]
    rows = []
    for model in models:
        if args.model is None or model.name in args.model:
            torch.set_num_threads(model.threads)
            for variant in VARIANTS:
                rows += measure(model, variant, args.rounds, args.round_s)
    print_table(rows, kernels.variant)
    save_record(args.json, kernels=kernels.variant, rows=rows)


def main() -> None:
    compare(__doc__, measure, print_table, rounds=7, round_s=0.5)


if __name__ == "__main__":
    main()
