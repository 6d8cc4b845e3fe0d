"""How long the card worked in a stretch of time, from the profiler's own record of kernels and copies."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

DEVICE_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST_KINDS = {"cpu_op"}
NAMES_KEPT = 12


@dataclass(frozen=True, slots=True)
class Busy:
    """`span_s`: seconds from the start of the first piece of work to the end of the last. `busy_s`: the part of them
    with at least one piece running. `slowest` has the names that took the most time in total, and `counts` how often
    each of them ran."""

    span_s: float
    busy_s: float
    pieces: int
    slowest: dict[str, float]
    counts: dict[str, int]

    @property
    def idle_share(self) -> float:
        return 1 - self.busy_s / self.span_s if self.span_s else 1.0


def record_busy(device: torch.device, seconds: float) -> Busy:
    """Records this process for `seconds`; other threads do the work. On a CPU torch's operators count as kernels."""
    on_card = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if on_card else activity.CPU]) as profile:
        time.sleep(seconds)
        if on_card:
            torch.cuda.synchronize()
        else:
            torch.zeros(1).add_(1)  # on a CPU the threads that existed before are not recorded
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return read_busy(events, DEVICE_KINDS if on_card else HOST_KINDS)


def read_busy(events: Iterable[dict[str, object]], kinds: set[str]) -> Busy:
    """`events` as in a Chrome trace, times in microseconds. Raises ValueError if none is of `kinds`."""
    spans: list[tuple[float, float]] = []
    by_name: dict[str, float] = {}
    counts: dict[str, int] = {}
    for event in events:
        if event.get("cat") in kinds and event.get("ph") == "X":
            begin, length = float(event["ts"]), float(event["dur"])  # type: ignore[arg-type]
            spans.append((begin, begin + length))
            name = str(event["name"])
            by_name[name] = by_name.get(name, 0.0) + length / 1e6
            counts[name] = counts.get(name, 0) + 1
    if not spans:
        raise ValueError("the profiler recorded no work")
    spans.sort()
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    slowest = dict(sorted(by_name.items(), key=lambda entry: -entry[1])[:NAMES_KEPT])
    times = {name: counts[name] for name in slowest}
    return Busy((reached - spans[0][0]) / 1e6, busy / 1e6, len(spans), slowest, times)
