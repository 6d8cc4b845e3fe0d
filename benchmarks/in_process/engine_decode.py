"""The engine alone, no Ray and no HTTP: tokens/s of one and of several streams, and where a step's time goes.

    python -m benchmarks.in_process.engine_decode --json engine.json

Three things are timed, round by round in turn: the whole engine decoding (scheduler, runner and deltas on the engine's
own thread), the runner's step alone, and the same engine around the null runner, which is the Python work per step.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import OtherProcesses, save_record, time_calls
from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.assembly import assemble_engine
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.build import build_engine
from engine.build_runner import build_runner
from engine.engine import LocalEngine
from engine.models.loader import load_model
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from tests.unit.engine.null_runner import NullRunner

EMBEDDED = Path("assets/models/kedge-chat")  # run from the repository root
PAGE_SIZE = 16
WAIT_S = 300.0


@dataclass
class Stopwatch:
    """A DeltaSink that notes when each stream's first and last tokens came."""

    streams: int
    first_s: list[float] = field(default_factory=list)
    last_s: float = 0.0
    finished: int = 0
    tokens: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        now_s = time.perf_counter()
        for delta in deltas:
            if delta.token_ids and delta.completion_tokens == len(delta.token_ids):
                self.first_s.append(now_s)
            self.tokens += len(delta.token_ids)
            if delta.finish is not None:
                self.finished += 1
                self.last_s = now_s
        if self.finished == self.streams:
            self.done.set()

    @property
    def step_s(self) -> float:
        """Mean time per token of a stream, from the moment every stream decodes until the last stream ends."""
        per_stream = self.tokens / self.streams
        return (self.last_s - max(self.first_s)) / (per_stream - 1)


class Sink:
    """Lets one engine serve run after run, each with its own stopwatch."""

    def __init__(self) -> None:
        self.watch = Stopwatch(0)

    def __call__(self, deltas: Sequence[TokenDelta]) -> None:
        self.watch(deltas)


def decode(
    engine: LocalEngine, sink: Sink, streams: int, prompt_len: int, new_tokens: int, seed: int
) -> Stopwatch:
    random = np.random.default_rng(seed)
    sink.watch = watch = Stopwatch(streams)
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for index in range(streams):
        prompt = random.integers(3, engine.vocab_size, prompt_len).tolist()
        engine.submit(GenerateRequest(f"{seed}-{index}", prompt, params))
    if not watch.done.wait(WAIT_S):
        raise SystemExit("the engine did not finish")
    return watch


def step_call(runner: TorchRunner, streams: int, context_len: int) -> Callable[[], object]:
    pages_each = -(-(context_len + 1) // PAGE_SIZE)
    greedy = SamplingParams(temperature=0.0)
    items = [
        BatchItem(
            str(index),
            [5],
            context_len,
            np.arange(index * pages_each, (index + 1) * pages_each, dtype=np.int32),
            True,
            SampleSpec(greedy),
        )
        for index in range(streams)
    ]
    return executing(runner, items)


def executing(runner: TorchRunner, items: list[BatchItem]) -> Callable[[], object]:
    """The window's pages, if the model has one, have the numbers of the others."""
    if runner._pool.window is not None:
        for item in items:
            item.window_pages = item.pages
    return lambda: runner.execute(ScheduledBatch(items))


def make_runner(settings: EngineSettings) -> TorchRunner:
    runner = build_runner(load_model(settings.model), settings.cache)
    assert isinstance(runner, TorchRunner)
    for paged in (runner._pool.full, runner._pool.window):
        if paged is not None:
            paged.kv_LJKSD.zero_()
    return runner


def measure(args: argparse.Namespace, streams: int, threads: int) -> dict[str, Any]:
    """One row: medians over rounds."""
    torch.set_num_threads(threads)
    settings = EngineSettings(
        ModelSettings(args.model, load_format=args.load_format, dtype=args.dtype, num_threads=threads),
        CacheSettings(page_size=PAGE_SIZE, size_bytes=args.cache_mib * 2**20, window_ratio=1.0),
        SchedulerSettings(),
    )
    sink, null_sink = Sink(), Sink()
    engine, runner = build_engine(settings, sink), make_runner(settings)
    null_runner = NullRunner(
        runner.facts.num_pages, PAGE_SIZE, runner.facts.vocab_size, runner.facts.max_context_len, poison=False
    )
    null_engine = assemble_engine(
        null_runner, settings.cache, settings.scheduler, settings.speculation, frozenset(), null_sink
    )
    middle = args.prompt_tokens + args.new_tokens // 2
    step = step_call(runner, streams, middle)
    engine.start()
    null_engine.start()
    others = OtherProcesses()
    rounds: dict[str, list[float]] = {"engine_step_s": [], "runner_step_s": [], "null_step_s": []}
    best_runner_s = []
    for seed in range(args.rounds + 1):
        shape = (streams, args.prompt_tokens, args.new_tokens, seed)
        engine_s = decode(engine, sink, *shape).step_s
        runner_steps = time_calls(step, args.new_tokens)
        null_s = decode(null_engine, null_sink, *shape).step_s
        if seed == 0:
            continue  # warm-up
        rounds["engine_step_s"].append(engine_s)
        rounds["runner_step_s"].append(runner_steps.median_s)
        rounds["null_step_s"].append(null_s)
        best_runner_s.append(runner_steps.best_s)
    engine.stop(10.0)
    null_engine.stop(10.0)
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    return {
        "streams": streams,
        "threads": threads,
        "tokens_per_s": streams / medians["engine_step_s"],
        "best_tokens_per_s": streams / min(rounds["engine_step_s"]),
        **medians,
        "best_runner_step_s": min(best_runner_s),
        "other_processes_cores": others.cores(),
        "rounds": rounds,
    }


def prefill(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    """One chunk of a prompt: tokens/s of the runner."""
    settings = EngineSettings(
        ModelSettings(args.model, load_format=args.load_format, dtype=args.dtype, num_threads=threads),
        CacheSettings(page_size=PAGE_SIZE, num_pages=64, window_ratio=1.0),
    )
    runner = make_runner(settings)
    spec = SampleSpec(SamplingParams(temperature=0.0))
    # Tokens that differ, so that experts, if there are any, differ too.
    prompt = np.random.default_rng(1).integers(3, runner.facts.vocab_size, 512).tolist()
    item = BatchItem("p", prompt, 0, np.arange(32, dtype=np.int32), True, spec)
    spread = time_calls(executing(runner, [item]), 10)
    return {"threads": threads, "tokens": 512, **asdict(spread), "tokens_per_s": 512 / spread.median_s}


def print_tables(rows: list[dict[str, Any]], prefills: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for name in (
        "streams", "threads", "tokens/s", "best round", "engine step ms", "runner step ms", "runner best ms",
        "Python work ms", "other cores",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        others = row["other_processes_cores"]
        table.add_row(
            str(row["streams"]),
            str(row["threads"]),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['best_tokens_per_s']:,.0f}",
            *(
                f"{row[name] * 1e3:.3f}"
                for name in ("engine_step_s", "runner_step_s", "best_runner_step_s", "null_step_s")
            ),
            "?" if others is None else f"{others:.2f}",
        )
    console = Console(width=130)
    console.print(table)
    for row in prefills:
        console.print(
            f"prefill of {row['tokens']} tokens, {row['threads']} threads: {row['tokens_per_s']:,.0f} tokens/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(EMBEDDED))
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache-mib", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [measure(args, streams, threads) for threads in args.threads for streams in args.streams]
    prefills = [prefill(args, threads) for threads in args.threads]
    print_tables(rows, prefills, f"Engine alone: {Path(args.model).name}, {args.new_tokens} new tokens")
    settings = {key: str(value) for key, value in vars(args).items() if key != "json"}
    save_record(args.json, settings=settings, decode=rows, prefill=prefills)


if __name__ == "__main__":
    main()
