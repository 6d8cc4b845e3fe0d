"""Who used the processors during a run, and what machine it ran on. Linux only; None elsewhere."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class CpuShares:
    """Mean number of cores in use. `other` is all − client − server; it is known only if the server's pid is."""

    all_cores: float
    client_cores: float
    server_cores: float | None
    other_cores: float | None


class CpuMeter:
    """Measures CPU use from its creation to `read`. The server is `server_pids` and all their descendants."""

    def __init__(self, server_pids: tuple[int, ...] = ()) -> None:
        self._server_pids = server_pids
        self._started_s = time.perf_counter()
        self._first = self._snapshot()

    def read(self) -> CpuShares | None:
        last, first = self._snapshot(), self._first
        if last is None or first is None:
            return None
        span_s = max(time.perf_counter() - self._started_s, 1e-9)
        all_cores = (last[0] - first[0]) / span_s
        client_cores = (last[1] - first[1]) / span_s
        if not self._server_pids:
            return CpuShares(all_cores, client_cores, None, None)
        server_s = sum(max(used - first[2].get(pid, 0.0), 0.0) for pid, used in last[2].items())
        server_cores = server_s / span_s
        other_cores = max(all_cores - client_cores - server_cores, 0.0)
        return CpuShares(all_cores, client_cores, server_cores, other_cores)

    def _snapshot(self) -> tuple[float, float, dict[int, float]] | None:
        """CPU seconds so far: of the machine, of this process, and of each server process."""
        try:
            ticks_per_s = os.sysconf("SC_CLK_TCK")
            fields = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        busy_s = (sum(fields) - fields[3] - fields[4]) / ticks_per_s  # all but idle and iowait
        own = os.times()
        return busy_s, own.user + own.system, _tree_cpu_s(self._server_pids, ticks_per_s)


def _tree_cpu_s(roots: tuple[int, ...], ticks_per_s: int) -> dict[int, float]:
    """CPU seconds by pid of `roots` and all their descendants."""
    if not roots:
        return {}
    used_s: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue  # it ended meanwhile
        pid = int(entry.name)
        children.setdefault(int(fields[1]), []).append(pid)
        used_s[pid] = (int(fields[11]) + int(fields[12])) / ticks_per_s
    tree: dict[int, float] = {}
    queue = list(roots)
    while queue:
        pid = queue.pop()
        if pid in used_s and pid not in tree:
            tree[pid] = used_s[pid]
            queue += children.get(pid, [])
    return tree


def describe_machine() -> dict[str, object]:
    """Facts that a reader of the figures needs, without names of hosts or users."""
    return {
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "client_scheduling": _scheduling(),
    }


def _cpu_model() -> str | None:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _scheduling() -> str:
    """ "real-time 50" under `chrt -f 50`, else "normal"."""
    if not hasattr(os, "sched_getscheduler"):
        return "unknown"
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        return f"real-time {os.sched_getparam(0).sched_priority}"
    return "normal"
