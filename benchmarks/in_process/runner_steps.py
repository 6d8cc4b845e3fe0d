"""A model's load and its runner's steps: decodes of some streams and 512 tokens of a prompt. It needs memory for one
copy of the weights, and compares commits where the engine's own benchmark would need two.

    python -m benchmarks.in_process.runner_steps --model FOLDER --json steps.json

The streams' tokens differ, so that they choose different experts, if there are any.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.measure import OtherProcesses, save_record, time_calls
from engine.api import SamplingParams
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.build_runner import build_runner
from engine.models.loader import load_model
from engine.runner.torch_runner import TorchRunner
from engine.settings import CacheSettings, ModelSettings

PAGE_SIZE = 16
PROMPT_TOKENS = 512
GREEDY = SampleSpec(SamplingParams(temperature=0.0))


def step_of(runner: TorchRunner, tokens: list[list[int]], context_len: int) -> Callable[[], object]:
    """A step that takes in these tokens of each stream, after a context of so many."""
    each = -(-(context_len + len(tokens[0])) // PAGE_SIZE)
    items = []
    for index, new in enumerate(tokens):
        pages = np.arange(index * each, (index + 1) * each, dtype=np.int32)
        items.append(BatchItem(str(index), new, context_len, pages, True, GREEDY))
        if runner._pool.window is not None:
            items[-1].window_pages = pages
    return lambda: runner.execute(ScheduledBatch(items))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256, help="tokens before a step of streams")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    others, started_s = OtherProcesses(), time.perf_counter()
    loaded = load_model(
        ModelSettings(args.model, load_format=args.load_format, dtype=args.dtype, num_threads=args.threads)
    )
    load_s = time.perf_counter() - started_s
    longest = max(args.context + PROMPT_TOKENS, max(args.streams) * (args.context + PAGE_SIZE))
    num_pages = longest // PAGE_SIZE
    runner = build_runner(loaded, CacheSettings(PAGE_SIZE, num_pages, window_ratio=1.0))
    assert isinstance(runner, TorchRunner)
    for paged in (runner._pool.full, runner._pool.window):
        if paged is not None:
            paged.kv_LJKSD.zero_()
    random = np.random.default_rng(1)
    prompt = random.integers(3, runner.facts.vocab_size, PROMPT_TOKENS).tolist()
    rows: list[dict[str, Any]] = []
    for streams in args.streams:
        step = step_of(runner, [[token] for token in prompt[:streams]], args.context)
        rows.append({"streams": streams, **asdict(time_calls(step, args.rounds, warmup=2))})
    for context in (0, args.context):
        figures = asdict(time_calls(step_of(runner, [prompt], context), 3, warmup=1))
        rows.append({"prompt_tokens": PROMPT_TOKENS, "context": context, **figures})
    status = Path("/proc/self/status").read_text()
    held_gb = int(status.split("VmRSS:")[1].split()[0]) / 1e6
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    result = {
        "settings": {name: str(value) for name, value in vars(args).items() if name != "json"},
        "about": dict(loaded.about),
        "load_s": load_s,
        "held_gb": held_gb,
        "peak_gb": peak_gb,
        "kv_bytes_each": runner.facts.page_size_bytes // PAGE_SIZE,
        "steps": rows,
        "other_processes_cores": others.cores(),
    }
    console = Console(width=110)
    console.print(f"{loaded.about}: load {load_s:.1f} s, {held_gb:.2f} GB held, {peak_gb:.2f} GB at most")
    console.print(f"{result['kv_bytes_each']} bytes of KV for a token")
    for row in rows:
        told = f"{row.get('streams')} streams after {args.context} tokens"
        if "prompt_tokens" in row:
            told = f"{row['prompt_tokens']} tokens of a prompt after {row['context']}"
        console.print(f"{told}: {row['median_s'] * 1e3:.1f} ms a step, best {row['best_s'] * 1e3:.1f}")
    save_record(args.json, **result)


if __name__ == "__main__":
    main()
