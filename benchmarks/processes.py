"""Finds the processes of a running cluster on this machine, to strike them or to measure what they use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KIB = 1024


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process uses at a moment. `pss_bytes`: its memory, with its part of shared memory."""

    pid: int
    role: str
    pss_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the processes of one kind use together. Memory that they share counts for each of them."""

    resident_bytes: int
    num_files: int

    def most(self, other: Held) -> Held:
        return Held(max(self.resident_bytes, other.resident_bytes), max(self.num_files, other.num_files))


def held_by(root: int) -> dict[str, Held]:
    """By role, what the processes below `root` use. Quicker than `footprints`."""
    found: dict[str, Held] = {}
    for pid in _descendants(root):
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            num_files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        role, own = _role(_command(pid)), pages * os.sysconf("SC_PAGE_SIZE")
        held = found.get(role, Held(0, 0))
        found[role] = Held(held.resident_bytes + own, held.num_files + num_files)
    return found


def cpu_seconds(root: int) -> dict[str, float]:
    """By role, CPU seconds that the live processes below `root` have used so far."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    found: dict[str, float] = {}
    for pid in _descendants(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        role = _role(_command(pid))
        found[role] = found.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / ticks_per_s
    return found


def siblings(pid: int, title: str) -> list[int]:
    """Processes with that title and the same parent, which is Ray's node."""
    parent = parent_of(pid)
    return [other for other in _children(parent) if _command(other)[0].startswith(title)]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def footprints(root: int) -> list[Footprint]:
    """The footprint of every live process below `root`."""
    found = []
    for pid in _descendants(root):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            pss_kib = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            num_files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            found.append(Footprint(pid, _role(_command(pid)), pss_kib * KIB, num_files))
        except OSError:
            continue
    return found


def _role(command: list[str]) -> str:
    """The name of the process's kind: for a worker its title without the running method, which Ray appends."""
    title = command[0]
    if title.startswith("ray::"):
        _, replica, rest = title.partition("ServeReplica:")  # while it starts, its own id comes before that
        whole = f"ray::{replica}{rest}" if replica else title
        return whole.split(".")[0].split(" ")[0]
    if len(command) < 3:  # a process that has written its own title has a line of one word
        title = title.partition(" ")[0]
    script = next((word for word in command[1:] if word.endswith(".py")), title)
    return Path(script).name


def _command(pid: int) -> list[str]:
    """The words of its command line; one empty word if the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return [""]


def _descendants(root: int) -> Iterator[int]:
    for child in _children(root):
        yield child
        yield from _descendants(child)


def _children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if parent_of(int(path.name)) == parent:
                found.append(int(path.name))
        except OSError:
            continue
    return found
