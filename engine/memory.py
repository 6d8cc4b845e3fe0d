"""How much memory there is, and errors that name the settings that ask for more.

Host memory is the machine's, or the limit of its container if that is lower (Linux, cgroup v2).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.device import device_name, free_gpu_bytes

MIB = 2**20
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


class MemoryShort(RuntimeError):
    """The settings ask for more memory than there is."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit and use of a control group, over all of its processes. Memory that the kernel can reclaim at once does not
    count as used."""

    limit_bytes: int
    used_bytes: int


def host_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """All host memory that this process and others can use."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine_bytes, *(limit.limit_bytes for limit in _limits(proc, cgroups))])


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Host memory that can still be allocated; None where it is unknown, as outside Linux."""
    try:
        meminfo = (proc / "meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable: *(\d+) kB$", meminfo, re.MULTILINE)
    if found is None:
        return None
    left = (max(limit.limit_bytes - limit.used_bytes, 0) for limit in _limits(proc, cgroups))
    return min([int(found[1]) * 1024, *left])


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory of the device that can still be allocated; None where it is unknown."""
    on_gpu = free_gpu_bytes(device)
    return free_host_bytes() if on_gpu is None else on_gpu


def check_free(device: torch.device, size_bytes: int, what: str, setting: str) -> None:
    """Checks that an allocation will fit. Raises MemoryShort. Without the check, a process on a CPU would be granted
    more memory than there is, and be killed when it uses it."""
    free_bytes = free_memory_bytes(device)
    if free_bytes is not None and size_bytes > free_bytes:
        raise MemoryShort(f"{what} takes {_mib(size_bytes)}; {_free_memory(device, free_bytes)} ({setting})")


def check_host(size_bytes: int, what: str, setting: str) -> None:
    """Checks the size of memory that is allocated later, as it is needed. Raises MemoryShort."""
    total_bytes = host_memory_bytes()
    if size_bytes > total_bytes:
        raise MemoryShort(
            f"{what} may take {_mib(size_bytes)}; this machine, or its container, has {_mib(total_bytes)} ({setting})"
        )


@contextmanager
def memory_for(device: torch.device, what: str, settings: str) -> Iterator[None]:
    """Around allocations whose size is not known beforehand. Raises MemoryShort in place of torch's own error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = _free_memory(device, free_memory_bytes(device) or 0)
        raise MemoryShort(f"there is no memory for {what}; {free} ({settings}): {error}") from error


def _free_memory(device: torch.device, free_bytes: int) -> str:
    return f"{device_name(device)} has {_mib(free_bytes)} free"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB"


def _limits(proc: Path, cgroups: Path) -> Iterator[Limit]:
    """Of this process's control group and those around it; a container sees its own group as the outermost."""
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
    """None if the group has no limit, or does not report it."""
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used_bytes = int((group / "memory.current").read_text())
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return Limit(int(limit), used_bytes - (int(cached[1]) if cached is not None else 0))
