"""Where a section runs: on a card, or dry on the CPU with tiny shapes and kernels in Triton's interpreter."""

from __future__ import annotations

import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from benchmarks.gpu.rows import Row, RowFile, failed, skipped
from benchmarks.measure import machine

T = TypeVar("T")

WARM_UP_S = 0.05
"""A card that was idle needs a while to reach its clocks."""

SETTLE_CALLS = 3
"""Calls before a graph is captured, in which kernels compile and handles are made."""


@dataclass(frozen=True)
class Stage:
    """`dry` is a run without a card: it checks that the code runs, and its times mean nothing.

    `options` are the command line's; `deadline_s` is on time.monotonic's clock.
    """

    section: str
    dry: bool
    device: torch.device
    out: RowFile
    deadline_s: float
    options: Any

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def row(self, item: str, measured: float | None = None, unit: str = "", **more: Any) -> None:
        row = Row(self.section, item, measured, unit, **more)
        self.out.add(row)
        print(
            f"[{self.section}] {row.item}: {row.measured} {row.unit} share {row.share} {row.note}", flush=True
        )

    def attempt(self, item: str, call: Callable[[], T]) -> T | None:
        """Runs one part of a section and returns its result. An exception becomes a row, and the section goes on."""
        if self.left_s <= 0:
            self.out.add(skipped(self.section, item, "no time left"))
            return None
        try:
            return call()
        except Exception as error:
            traceback.print_exc()
            self.out.add(failed(self.section, item, f"{type(error).__name__}: {error}"))
            return None

    def wants(self, name: str) -> bool:
        """Whether --cases lets this case through."""
        parts = [part for part in self.options.cases.split(",") if part]
        return not parts or any(part in name for part in parts)

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def synchronize_stream(self) -> None:
        """Waits for this thread's own work, not for that of other threads."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: the median of `repeats` timed runs of `calls` calls each, with the best and the worst.
    `by` says how it was timed."""

    median_s: float
    best_s: float
    worst_s: float
    repeats: int
    calls: int
    by: str


def time_device(
    stage: Stage,
    call: Callable[[int], object],
    inputs: int,
    repeats: int = 11,
    after: Callable[[Callable[[], object]], None] | None = None,
) -> Timing:
    """Times `call(i)` for i in range(inputs) as one CUDA graph, so that gaps between launches are small, or by events
    around plain calls if it cannot be captured. Inputs together should be larger than the L2 cache. `after` gets the
    timed run, to run it once more: a graph writes to the same places, so `after` can poison the outputs first."""
    if stage.device.type != "cuda":
        return _time_host(call, inputs, after)
    for index in range(max(SETTLE_CALLS, inputs)):
        call(index % inputs)
    torch.cuda.synchronize()
    run, by = captured(call, inputs)
    settle_s = time.monotonic() + WARM_UP_S
    while time.monotonic() < settle_s:
        run()
        torch.cuda.synchronize()
    times_s = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times_s.append(begin.elapsed_time(end) / 1e3 / inputs)
    if after is not None:
        after(run)
    ordered = sorted(times_s[1:])
    return Timing(ordered[len(ordered) // 2], ordered[0], ordered[-1], repeats, inputs, by)


def captured(call: Callable[[int], object], inputs: int) -> tuple[Callable[[], object], str]:
    """Runs of `call(i)` for i in range(inputs) as one CUDA graph, or one after another if they cannot be captured, and
    the name of the way."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            call(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(inputs):
                call(index)
    except Exception as error:
        torch.cuda.synchronize()
        print(f"not captured, timed by events: {error}", flush=True)

        def plain() -> None:
            for index in range(inputs):
                call(index)

        return plain, "events"
    return graph.replay, "graph"


def _time_host(
    call: Callable[[int], object], inputs: int, after: Callable[[Callable[[], object]], None] | None
) -> Timing:
    def run() -> None:
        for index in range(inputs):
            call(index)

    begin_s = time.perf_counter()
    run()
    spent_s = (time.perf_counter() - begin_s) / inputs
    if after is not None:
        after(run)
    return Timing(spent_s, spent_s, spent_s, 1, inputs, "host clock")


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, the card and the versions, all of them read from the system."""
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "triton": None}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    found: dict[str, Any] = {
        "card": None,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        **versions,
        "machine": machine(),
    }
    if device.type == "cuda":
        traits = torch.cuda.get_device_properties(device)
        found |= {
            "card": traits.name,
            "multiprocessors": traits.multi_processor_count,
            "memory_bytes": traits.total_memory,
            "l2_bytes": getattr(traits, "L2_cache_size", None),
            "capability": list(torch.cuda.get_device_capability(device)),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "state": _card_state(),
        }
    return found


def _card_state() -> str | None:
    """Driver, clocks and load as the driver's tool reads them; None if there is no tool."""
    query = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,utilization.gpu"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
