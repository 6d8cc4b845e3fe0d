"""The machine's memory, and that of a container, which may use less of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.memory import free_host_bytes, host_memory_bytes

MIB = 2**20


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """/proc and cgroup files as the kernel shows them to a process in the group /outer/inner. 900 MiB are free, and no
    group has a limit."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 4096000 kB\nMemAvailable:  {900 * 1024} kB\n")
    (proc / "self" / "cgroup").write_text("3:cpuset:/elsewhere\n0::/outer/inner\n")
    for group in (cgroups, cgroups / "outer", cgroups / "outer" / "inner"):
        group.mkdir()
    for group in (
        cgroups / "outer",
        cgroups / "outer" / "inner",
    ):  # a machine's outermost group has no such files
        limit(group, "max", 700)
    return proc, cgroups


def limit(group: Path, limit_mib: int | str, used_mib: int, cached_mib: int = 0) -> None:
    limit_bytes = limit_mib if isinstance(limit_mib, str) else limit_mib * MIB
    (group / "memory.max").write_text(f"{limit_bytes}\n")
    (group / "memory.current").write_text(f"{used_mib * MIB}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cached_mib * MIB}\nactive_file 7\n")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says")
def test_of_this_machine() -> None:
    free_bytes = free_host_bytes()
    assert free_bytes is not None
    assert MIB < free_bytes < host_memory_bytes()


def test_without_a_limit_the_machine_counts(places: tuple[Path, Path]) -> None:
    assert free_host_bytes(*places) == 900 * MIB
    assert host_memory_bytes(*places) == host_memory_bytes(places[0], Path("/nowhere")) > 100 * MIB


@pytest.mark.parametrize("group", ["outer", "outer/inner"])
def test_the_tightest_limit_counts(places: tuple[Path, Path], group: str) -> None:
    limit(places[1] / group, 64, used_mib=40, cached_mib=10)
    assert host_memory_bytes(*places) == 64 * MIB
    assert free_host_bytes(*places) == 34 * MIB, "cached files give way"


def test_a_container_sees_itself_as_the_outermost(places: tuple[Path, Path]) -> None:
    (places[0] / "self" / "cgroup").write_text("0::/\n")
    limit(places[1], 64, used_mib=70)
    assert host_memory_bytes(*places) == 64 * MIB
    assert free_host_bytes(*places) == 0


def test_a_limit_above_what_is_free_gives_nothing(places: tuple[Path, Path]) -> None:
    limit(places[1] / "outer", 5000, used_mib=0)
    assert free_host_bytes(*places) == 900 * MIB


def test_where_nobody_says(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path, tmp_path) is None
    assert host_memory_bytes(tmp_path, tmp_path) > 100 * MIB
