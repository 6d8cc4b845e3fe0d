"""How close decode comes to the floor: the time that reading all weights takes at the measured copy bandwidth.

    python -m benchmarks.in_process.weight_bandwidth --json weights.json

It first measures every way to multiply that the engine has on this CPU (engine/models/linear.py), on matrices that
together do not fit a cache; then whole decode steps of one stream, with a random model of about 500 million parameters.
Copy bandwidth counts bytes read and written, and is measured again beside every figure: neighbours change it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.in_process.engine_decode import make_runner, step_call
from benchmarks.measure import OtherProcesses, Spread, copy_bandwidth, save_record, time_calls
from engine.models.config import parse_spec
from engine.models.half_linear import ThreadedHalfLinear, halve_exactly
from engine.models.linear import Linear, OneDnnLinear, PlainLinear, SlicedLinear, packs_bfloat16
from engine.models.tensor_shapes import tensor_shapes
from engine.settings import CacheSettings, DTypeName, EngineSettings, ModelSettings

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 1280,
    "intermediate_size": 3584,
    "num_hidden_layers": 26,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
SHAPES = ((1536, 1024), (5632, 1024), (1024, 2816), (32000, 1024))
BYTES_PER_SHAPE = 160e6
CONTEXT_LEN = 100


def half(weight: Tensor) -> Linear:
    halved = halve_exactly(weight)
    assert halved is not None
    return ThreadedHalfLinear(halved, None)


PACKED_BFLOAT16 = "bfloat16, oneDNN packed"
WAYS: dict[str, tuple[int, Callable[[Tensor], Linear]]] = {
    # name: bytes per weight, how to make it from bfloat16 values held in float32
    "float32, torch": (4, PlainLinear),
    "float32, slices": (4, partial(SlicedLinear, bias_O=None)),
    "float32, oneDNN": (4, partial(OneDnnLinear, packed=False)),
    "float32, oneDNN packed": (4, partial(OneDnnLinear, packed=True)),
    "16 bits exactly": (2, half),
    "bfloat16, torch": (2, lambda weight: PlainLinear(weight.bfloat16())),
    PACKED_BFLOAT16: (2, lambda weight: OneDnnLinear(weight.bfloat16(), packed=True)),
}


def measure_way(name: str, shape: tuple[int, int], rows: int) -> dict[str, Any] | None:
    width, make = WAYS[name]
    if rows > 1 and name == "float32, slices":
        return None
    if name == PACKED_BFLOAT16 and not packs_bfloat16():
        return None
    count = max(2, round(BYTES_PER_SHAPE / (math.prod(shape) * width)))
    weights = [(torch.randn(shape) * 0.05).bfloat16().float() for _ in range(2)]
    linears = [make(weights[index % 2].clone()) for index in range(count)]
    x = torch.randn(rows, shape[1])
    x = x.bfloat16() if name == "bfloat16, torch" else x

    def all_of_them() -> None:
        for linear in linears:
            linear(x)

    copy = copy_bandwidth(4)
    spread = time_calls(all_of_them, 8)
    size = math.prod(shape) * count
    return {
        "way": name,
        "outputs": shape[0],
        "inputs": shape[1],
        "rows": rows,
        "weights_per_s": size / spread.best_s,
        "bytes_per_s": size * width / spread.best_s,
        "copy_bytes_per_s": copy,
    }


VARIANTS: dict[str, tuple[str, DTypeName, int]] = {
    # name: the checkpoint's dtype, the setting, bytes read per weight in decode
    "float32 checkpoint": ("float32", "float32", 4),
    "bfloat16 checkpoint, float32 (default)": ("bfloat16", "float32", 2),
    "bfloat16 checkpoint, bfloat16": ("bfloat16", "bfloat16", 2),
}


def measure_model(variant: str, threads: int, rounds: int) -> dict[str, Any]:
    checkpoint, dtype, width = VARIANTS[variant]
    parameters = sum(math.prod(shape) for shape in tensor_shapes(parse_spec(MODEL)).values())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**MODEL, "dtype": checkpoint}))
        model = ModelSettings(folder, load_format="dummy", dtype=dtype, device="cpu", num_threads=threads)
        runner = make_runner(EngineSettings(model, CacheSettings(num_pages=64)))
    step = step_call(runner, 1, CONTEXT_LEN)
    others, ratios, steps, copies = OtherProcesses(), [], [], []
    for _ in range(rounds):
        copy = copy_bandwidth(4)
        spread: Spread = time_calls(step, 10)
        floor_s = width * parameters / copy
        ratios.append(spread.median_s / floor_s)
        steps.append(spread)
        copies.append(copy)
    return {
        "variant": variant,
        "parameters": parameters,
        "bytes_read": width * parameters,
        "step_s": statistics.median(spread.median_s for spread in steps),
        "copy_bytes_per_s": statistics.median(copies),
        "ratio_to_floor": statistics.median(ratios),
        "best_ratio_to_floor": min(ratios),
        "other_processes_cores": others.cores(),
        "rounds": [asdict(spread) for spread in steps],
    }


def print_tables(ways: list[dict[str, Any]], models: list[dict[str, Any]]) -> None:
    console = Console(width=130)
    if ways:
        table = Table(title="One product, weights from memory: GB/s of weights (copy bandwidth beside)")
        for name in ("way", "outputs x inputs", "rows", "GB/s", "copy GB/s"):
            table.add_column(name, justify="left" if name == "way" else "right")
        for row in ways:
            table.add_row(
                row["way"],
                f"{row['outputs']} x {row['inputs']}",
                str(row["rows"]),
                f"{row['bytes_per_s'] / 1e9:.1f}",
                f"{row['copy_bytes_per_s'] / 1e9:.1f}",
            )
        console.print(table)
    table = Table(title="A decode step of one stream, random weights")
    for name in (
        "model",
        "parameters",
        "bytes",
        "step ms",
        "tokens/s",
        "copy GB/s",
        "x floor",
        "best round",
        "other cores",
    ):
        table.add_column(name, justify="right")
    for row in models:
        table.add_row(
            row["variant"],
            f"{row['parameters'] / 1e6:.0f} M",
            f"{row['bytes_read'] / 1e9:.2f} GB",
            f"{row['step_s'] * 1e3:.1f}",
            f"{1 / row['step_s']:.1f}",
            f"{row['copy_bytes_per_s'] / 1e9:.1f}",
            f"{row['ratio_to_floor']:.2f}",
            f"{row['best_ratio_to_floor']:.2f}",
            f"{row['other_processes_cores'] or 0.0:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model-only", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ways = []
    if not args.model_only:
        with torch.inference_mode():
            for shape in SHAPES:
                for rows in args.rows:
                    measured = (measure_way(name, shape, rows) for name in WAYS)
                    ways += [row for row in measured if row is not None]
    models = [measure_model(variant, args.threads, args.rounds) for variant in VARIANTS]
    print_tables(ways, models)
    save_record(args.json, products=ways, models=models)


if __name__ == "__main__":
    main()
