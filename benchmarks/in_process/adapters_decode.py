"""What adapters cost a CPU: a runner's decode steps and prompts with none, with one, and with a different one for each
stream, in turn in one process.

    python -m benchmarks.in_process.adapters_decode --model FOLDER --load-format dummy --json adapters.json

The adapters have random weights for all seven matrices of a layer. Beside the times: the bytes of weights that a step
reads of the model, and of the adapters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.measure import OtherProcesses, Spread, save_record, time_calls
from engine.api import SamplingParams
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.build_runner import build_runner
from engine.models.adapters import CONFIG_FILE, WEIGHTS_FILE
from engine.models.config import ModelSpec, parse_spec, read_config
from engine.models.loader import load_model
from engine.models.tensor_shapes import tensor_shapes
from engine.runner.torch_runner import TorchRunner
from engine.settings import AdapterSettings, CacheSettings, ModelSettings

EMBEDDED = "assets/models/kedge-chat"  # run from the repository root
PAGE_SIZE = 16
PROMPT_TOKENS = 512
CONTEXT_TOKENS = 256
GREEDY = SampleSpec(SamplingParams(temperature=0.0))


def write_adapter(directory: Path, spec: ModelSpec, rank: int, seed: int) -> int:
    """Makes an adapter for every projection. Returns the number of its weights."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        if name.endswith("_proj.weight"):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for part, sizes in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                weights = torch.randn(sizes, generator=generator) * 0.02
                tensors[f"{module}.lora_{part}.weight"] = weights.bfloat16()
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return sum(tensor.numel() for tensor in tensors.values())


def decode_step(runner: TorchRunner, adapters: list[str]) -> Callable[[], object]:
    """A step of as many streams as `adapters`, one token each."""
    each = CONTEXT_TOKENS // PAGE_SIZE + 1
    items = [
        BatchItem(
            str(index), [5], CONTEXT_TOKENS, np.arange(index * each, (index + 1) * each, dtype=np.int32), True,
            GREEDY, adapter=adapter,
        )
        for index, adapter in enumerate(adapters)
    ]  # fmt: skip
    return partial(runner.execute, ScheduledBatch(items))


def prompt_step(runner: TorchRunner, adapter: str) -> Callable[[], object]:
    prompt = np.random.default_rng(1).integers(3, runner.facts.vocab_size, PROMPT_TOKENS).tolist()
    pages = np.arange(PROMPT_TOKENS // PAGE_SIZE, dtype=np.int32)
    return partial(
        runner.execute, ScheduledBatch([BatchItem("p", prompt, 0, pages, True, GREEDY, adapter=adapter)])
    )


def measure(runner: TorchRunner, names: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of streams, and one for a prompt: medians of each way's steps, round by round in turn."""
    rows = []
    for streams in args.streams:
        mixed = [names[index % len(names)] for index in range(streams)]
        ways = {"none": [""] * streams, "one": names[:1] * streams, "each its own": mixed}
        rows.append(
            {"streams": streams}
            | rounds({way: decode_step(runner, adapters) for way, adapters in ways.items()}, args, 12)
        )
    steps = {"none": prompt_step(runner, ""), "one": prompt_step(runner, names[0])}
    rows.append({"prompt_tokens": PROMPT_TOKENS} | rounds(steps, args, 2))
    return rows


def rounds(steps: dict[str, Callable[[], object]], args: argparse.Namespace, count: int) -> dict[str, Any]:
    times_s: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(args.rounds):
        for way, step in steps.items():
            times_s[way].append(time_calls(step, count, warmup=1).median_s)
    return {way: asdict(Spread.of(found)) for way, found in times_s.items()}


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for name in ("step", "none, ms", "one adapter, ms", "each its own, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        told = f"{row['streams']} streams" if "streams" in row else f"{row['prompt_tokens']} prompt tokens"
        base_s = row["none"]["median_s"]
        cells = [
            f"{row[way]['median_s'] * 1e3:.1f} ({row[way]['median_s'] / base_s:.2f} ×)" if way in row else ""
            for way in ("one", "each its own")
        ]
        table.add_row(told, f"{base_s * 1e3:.1f}", *cells)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = parse_spec(read_config(Path(args.model)))
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            AdapterSettings(f"adapter-{number}", f"{folder}/{number}") for number in range(args.adapters)
        ]
        sizes = [write_adapter(Path(each.path), spec, args.rank, seed) for seed, each in enumerate(adapters)]
        settings = ModelSettings(
            args.model,
            args.load_format,
            args.dtype,
            "cpu",
            num_threads=args.threads,
            adapters=tuple(adapters),
        )
        runner = build_runner(load_model(settings), CacheSettings(PAGE_SIZE, 1024))
    assert isinstance(runner, TorchRunner)
    runner._pool.full.kv_LJKSD.zero_()
    others = OtherProcesses()
    rows = measure(runner, [each.name for each in adapters], args)
    weights = sum(int(np.prod(shape)) for name, shape in tensor_shapes(spec).items() if "embed" not in name)
    of_adapters = f"{args.adapters} adapters of rank {args.rank} ({sizes[0] / 1e6:.1f} M weights each)"
    print_table(rows, f"{Path(args.model).name}, {weights / 1e6:.0f} M weights a step, {of_adapters}")
    told = {key: str(value) for key, value in vars(args).items() if key != "json"}
    told |= {"weights": str(weights), "weights_of_an_adapter": str(sizes[0])}
    save_record(args.json, settings=told, steps=rows, other_processes_cores=others.cores())


if __name__ == "__main__":
    main()
