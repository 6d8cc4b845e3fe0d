"""What the engine benchmarks share: the floor, the machine, and who else used it."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COPY_FLOATS = 32 * 1024 * 1024
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
BUSY_COLUMNS = 3  # user, nice, system of /proc/stat


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of repeated runs."""

    best_s: float
    median_s: float
    p95_s: float

    @classmethod
    def of(cls, times_s: list[float]) -> Spread:
        ordered = sorted(times_s)
        return cls(ordered[0], statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))])


def time_calls(call: Callable[[], object], count: int, warmup: int = 2) -> Spread:
    for _ in range(warmup):
        call()
    times_s = []
    for _ in range(count):
        begin_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - begin_s)
    return Spread.of(times_s)


def copy_bandwidth(count: int = 8) -> float:
    """Bytes read and written per second by a copy of 128 MiB, best of `count`, with torch's threads."""
    source = torch.randn(COPY_FLOATS)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_calls(lambda: target.copy_(source), count).best_s


class OtherProcesses:
    """Measures how many cores everything but this process used."""

    def __init__(self) -> None:
        self._begin_s, self._begin_cpu_s = time.perf_counter(), self._cpu_s()

    def cores(self) -> float | None:
        """Mean since the start; None if /proc/stat cannot be read."""
        if self._begin_cpu_s is None or (now_cpu_s := self._cpu_s()) is None:
            return None
        return max(0.0, (now_cpu_s - self._begin_cpu_s) / (time.perf_counter() - self._begin_s))

    @staticmethod
    def _cpu_s() -> float | None:
        try:
            fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        own = os.times()
        return sum(int(field) for field in fields[:BUSY_COLUMNS]) / CLOCK_TICKS - own.user - own.system


def save_record(path: Path | None, **figures: Any) -> None:
    """Writes the machine and the figures as JSON, if there is a path to write to."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **figures}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
