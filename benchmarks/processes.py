"""Finds the processes of a running cluster, to strike them."""

from __future__ import annotations

from pathlib import Path


def siblings(pid: int, title: str) -> list[int]:
    """Processes with the same parent, Ray's node, and that title."""
    parent = _parent(pid)
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.joinpath("cmdline").read_text().startswith(title) and _parent(int(path.name)) == parent:
                found.append(int(path.name))
        except OSError:
            continue
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
