"""How much of the host's memory this process may use: of the machine's, or of its container's (Linux, cgroup v2)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Limit:
    """Of a control group, over all of its processes. What the kernel would give back at once is not used."""

    limit_bytes: int
    used_bytes: int


def host_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """All memory that there is for this process and others."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine_bytes, *(limit.limit_bytes for limit in _limits(proc, cgroups))])


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """What may still be allocated; None where nobody says, as outside Linux."""
    try:
        meminfo = (proc / "meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable: *(\d+) kB$", meminfo, re.MULTILINE)
    if found is None:
        return None
    left = (max(limit.limit_bytes - limit.used_bytes, 0) for limit in _limits(proc, cgroups))
    return min([int(found[1]) * 1024, *left])


def _limits(proc: Path, cgroups: Path) -> Iterator[Limit]:
    """Of this process's group and those around it; a container sees its own as the outermost."""
    try:
        found = re.search(r"^0::/(.*)$", (proc / "self" / "cgroup").read_text(), re.MULTILINE)
    except OSError:
        return
    if found is None:
        return
    group = cgroups / found[1]
    while group.is_relative_to(cgroups):
        limit = _limit_of(group)
        if limit is not None:
            yield limit
        group = group.parent


def _limit_of(group: Path) -> Limit | None:
    """None without a limit, or where the group does not say."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used_bytes = int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return Limit(int(limit), used_bytes - (int(cached[1]) if cached is not None else 0))
