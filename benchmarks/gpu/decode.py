"""Decoding of a random Llama with the real engine, one stream and 64, against what must be read from memory.

The floor of a step is its weights and the KV of its sequences, each byte read once, over the copy bandwidth of the same
run.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.gpu.busy import Busy, record_busy
from benchmarks.gpu.ceilings import copy_bandwidth
from benchmarks.gpu.engines import Bench, Watch, request
from benchmarks.gpu.stage import Stage
from engine.assembly import assemble_engine
from engine.batch import ScheduledBatch
from engine.engine import LocalEngine
from engine.runner.protocol import Done
from engine.settings import CacheSettings, ExecutionSettings, KVDType, SchedulerSettings, SpeculationSettings
from tests.unit.engine.null_runner import NullRunner

SECTION_TARGETS = {1: 0.80, 64: 0.70}
FP8 = "FP8 weights"
ONE_ORDER = "deterministic"
FP8_TARGET = 0.75
IDLE_TARGET = 0.05
WAIT_S = 120.0
PROFILE_S = 0.5
IDLE_FACTOR = 4
"""How much longer streams are for the profiler, which takes a while to start."""


@dataclass(frozen=True, slots=True)
class Load:
    """How many streams run at a time, tokens of each prompt, and tokens that each stream generates."""

    streams: int
    prompt_tokens: int
    new_tokens: int

    @property
    def kv_tokens(self) -> int:
        return self.streams * (self.prompt_tokens + IDLE_FACTOR * self.new_tokens + 64) + 1024


@dataclass(frozen=True, slots=True)
class Decoded:
    """Figures of the stretch in which every stream decoded: from the last stream's first token to the end of the first
    stream. `context_len` is the mean over streams and time."""

    tokens_per_s: float
    step_s: float
    context_len: float
    seconds: float
    steps: float


ONE = Load(1, 128, 512)
MANY = Load(64, 2048, 256)
DRY_ONE, DRY_MANY = Load(1, 8, 12), Load(4, 20, 48)

DEFAULT = ExecutionSettings()
WAYS = {
    "default": DEFAULT,
    "4 steps a launch": replace(DEFAULT, decode_steps=4),
    "8 steps a launch": replace(DEFAULT, decode_steps=8),
    "no overlap": replace(DEFAULT, overlap=False),
    "no graphs": replace(DEFAULT, graphs=False),
    "neither": replace(DEFAULT, graphs=False, overlap=False),
}
"""Execution settings; the targets are for the first."""


def run(stage: Stage) -> None:
    shape = stage.options.model or ("tiny" if stage.dry else "8b")
    one, many = (DRY_ONE, DRY_MANY) if stage.dry else (ONE, MANY)
    copied = copy_bandwidth(stage)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, stage.device, Path(folder))
        stage.attempt("Python work per step", partial(python_work, stage, many, bench.spec.vocab_size))
        for name, execution in WAYS.items():
            if not stage.wants(name):
                continue
            stage.attempt(name, partial(one_way, stage, bench, name, execution, (one, many), copied))
        # Torch's attention, which a CPU has by default, cannot read fp8.
        execution = replace(DEFAULT, attention="triton") if stage.dry else DEFAULT
        fewer = replace(many, new_tokens=8) if stage.dry else many
        if stage.wants("fp8 KV"):
            stage.attempt(
                "fp8 KV", partial(one_way, stage, bench, "fp8 KV", execution, (fewer,), copied, "fp8")
            )
        if stage.wants(ONE_ORDER):
            execution = replace(DEFAULT, deterministic=True)
            fixed = partial(one_way, stage, bench, ONE_ORDER, execution, (one, many), copied)
            stage.attempt(ONE_ORDER, fixed)
        execution = replace(DEFAULT, linear="torch")  # last, since weights are loaded anew for it
        if stage.wants("cuBLAS"):
            stage.attempt("cuBLAS", partial(one_way, stage, bench, "cuBLAS alone", execution, (one,), copied))
        bench.close()
    if stage.wants(FP8):
        stage.attempt(FP8, partial(fp8_weights, stage, shape, (one, many), copied))


def fp8_weights(stage: Stage, shape: str, loads: Sequence[Load], copied: float) -> None:
    """The same shape with matrices in fp8, a scale for each block. A CPU multiplies them out."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, stage.device, Path(folder), fp8=True)
        one_way(stage, bench, FP8, DEFAULT, loads, copied)
        bench.close()


def one_way(
    stage: Stage,
    bench: Bench,
    name: str,
    execution: ExecutionSettings,
    loads: Sequence[Load],
    copied: float,
    kv_dtype: KVDType = "auto",
) -> None:
    watch = Watch()
    most = max(load.kv_tokens for load in loads)
    widest = max(load.streams for load in loads)
    scheduler = SchedulerSettings(max_batch_tokens=8192, chunk_size=2048, max_running=widest)
    with bench.engine(watch, most, execution, scheduler, kv_dtype) as engine:
        if name in ("default", FP8, ONE_ORDER):
            about = dict(engine.describe())
            stage.row(
                "engine", note=", ".join(f"{key} {value}" for key, value in about.items()), details=about
            )
        for load in loads:
            few = replace(
                load, prompt_tokens=min(128, load.prompt_tokens), new_tokens=max(8, load.new_tokens // 8)
            )
            decode(engine, watch, few, seed=100)  # warm-up
            repeats = 3 if name == "default" and not stage.dry else 1
            rounds = [decode(engine, watch, load, seed) for seed in range(repeats)]
            middle = statistics.median_low([each.tokens_per_s for each in rounds])
            result = next(each for each in rounds if each.tokens_per_s == middle)
            report(stage, bench, name, load, result, copied, kv_dtype)
            if name == "default":
                stage.attempt("idle share", partial(idle, stage, engine, watch, load))


def report(
    stage: Stage, bench: Bench, name: str, load: Load, result: Decoded, copied: float, kv_dtype: str
) -> None:
    kv_token_bytes = bench.kv_token_bytes
    if kv_dtype == "fp8":
        head_dim = bench.spec.head_dim
        kv_token_bytes = round(kv_token_bytes * (head_dim + 4) / (head_dim * bench.dtype.itemsize))
    floor_s = (bench.weight_bytes + load.streams * result.context_len * kv_token_bytes) / copied
    stage.row(
        f"{bench.shape} Llama, batch {load.streams} at {result.context_len:,.0f} tokens, {name}",
        result.tokens_per_s,
        "tok/s",
        limit=load.streams / floor_s,
        share=floor_s / result.step_s,
        target=_target(name, load.streams),
        note=f"step {result.step_s * 1e3:.3f} ms, floor {floor_s * 1e3:.3f} ms",
        details=asdict(result),
    )


def _target(name: str, streams: int) -> float | None:
    if name == FP8:
        return FP8_TARGET if streams == 1 else None
    return SECTION_TARGETS.get(streams) if name == "default" else None


def decode(engine: LocalEngine, watch: Watch, load: Load, seed: int) -> Decoded:
    names = submit(engine, load, seed)
    watch.wait(names, WAIT_S)
    return steady(watch, names, load)


def submit(engine: LocalEngine, load: Load, seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    names = []
    for index in range(load.streams):
        prompt = random.integers(3, engine.vocab_size, load.prompt_tokens).tolist()
        names.append(f"{seed}-{load.streams}-{load.new_tokens}-{index}")
        engine.submit(request(names[-1], prompt, load.new_tokens))
    return names


def steady(watch: Watch, names: Sequence[str], load: Load) -> Decoded:
    """Raises ValueError if the streams did not decode together long enough."""
    begin_s = max(watch.times_s[name][0] for name in names)
    end_s = min(watch.times_s[name][-1] for name in names)
    tokens, lengths = 0, []
    for name in names:
        times_s = np.asarray(watch.times_s[name])
        inside = np.flatnonzero((times_s > begin_s) & (times_s <= end_s))
        tokens += len(inside)
        lengths += (load.prompt_tokens + inside).tolist()
    if end_s <= begin_s or tokens < 2 * load.streams:
        raise ValueError(f"{load.streams} streams decoded together for {tokens} tokens only")
    steps = tokens / load.streams
    seconds = end_s - begin_s
    return Decoded(tokens / seconds, seconds / steps, float(np.mean(lengths)), seconds, steps)


def idle(stage: Stage, engine: LocalEngine, watch: Watch, load: Load) -> None:
    """Measures the idle share while all streams decode. The profiler slows launches, so a step's time is measured
    without it first, on the same streams."""
    with contextlib.suppress(ValueError):
        record_busy(stage.device, 0.001)  # loads the profiler
    names = submit(engine, replace(load, new_tokens=IDLE_FACTOR * load.new_tokens), seed=200)
    with watch.changed:
        watch.changed.wait_for(lambda: all(len(watch.tokens.get(name, ())) > 4 for name in names), WAIT_S)
    seconds = 0.01 if stage.dry else PROFILE_S
    begin_s, before = time.perf_counter(), _tokens(watch, names)
    time.sleep(seconds)
    took_s, steps = time.perf_counter() - begin_s, (_tokens(watch, names) - before) / load.streams
    busy = record_busy(stage.device, seconds)
    still = not any(name in watch.finished for name in names)
    for name in names:
        engine.abort(name)
    watch.wait(names, WAIT_S)
    idle_row(stage, busy, load, took_s / steps if steps else 0.0, still)


def idle_row(stage: Stage, busy: Busy, load: Load, step_s: float, still: bool) -> None:
    note = f"{busy.pieces} kernels and copies in {busy.span_s * 1e3:.0f} ms"
    note += f"; a step takes {step_s * 1e3:.2f} ms without the profiler"
    if not still:
        note += "; some streams ended inside"
    stage.row(
        f"GPU idle share, batch {load.streams}", 100 * busy.idle_share, "%",
        share=busy.idle_share, target=IDLE_TARGET, goal="at_most", note=note,
        details={**asdict(busy), "unprofiled_step_s": step_s},
    )  # fmt: skip


def _tokens(watch: Watch, names: Sequence[str]) -> int:
    return sum(len(watch.tokens.get(name, ())) for name in names)


class ClockedRunner(NullRunner):
    """Notes how long its steps with `streams` decodes took."""

    def __init__(self, streams: int, *sizes: int) -> None:
        super().__init__(*sizes, poison=False)
        self._streams = streams
        self.took_s: list[float] = []

    def launch(self, batch: ScheduledBatch) -> Done:
        begin_s = time.perf_counter()
        done = super().launch(batch)
        num_tokens = batch.num_steps * sum(item.num_tokens for item in batch.items)
        if num_tokens == len(batch.items) == self._streams:
            self.took_s.append(time.perf_counter() - begin_s)
        return done


def python_work(stage: Stage, load: Load, vocab_size: int) -> None:
    """The same load on the null runner: a step's scheduling, books and deltas, which the card's work must hide. The
    null runner's own work is not part of it."""
    watch = Watch()
    pages = load.streams * (-(-(load.prompt_tokens + 256) // 16) + 1)
    runner = ClockedRunner(load.streams, pages, 16, vocab_size, load.prompt_tokens + 512)
    scheduler = SchedulerSettings(max_batch_tokens=8192, chunk_size=2048, max_running=load.streams)
    engine = assemble_engine(
        runner, CacheSettings(num_pages=pages), scheduler, SpeculationSettings(), frozenset(), watch
    )
    engine.start()
    try:
        result = decode(engine, watch, replace(load, new_tokens=256), seed=1)
    finally:
        engine.stop(WAIT_S)
    own_s = float(np.median(runner.took_s)) if runner.took_s else 0.0
    stage.row(
        f"Python work per step, batch {load.streams}", (result.step_s - own_s) * 1e3, "ms",
        note=f"step on the null runner {result.step_s * 1e3:.3f} ms, of which the runner {own_s * 1e3:.3f} ms",
    )  # fmt: skip
