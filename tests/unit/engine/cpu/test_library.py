"""Builds of the kernels are found. Builds of other sources are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from engine.cpu import library
from engine.cpu.library import FOLDER, Kernels, NoKernels, Workers, find_kernels
from tests.unit.engine.cpu.builds import RUNNING, every_build, kernels_of

ROOT = Path(__file__).parents[4]


def build_in(folder: Path) -> list[str]:
    """The command that compiles the kernels into this folder."""
    places = ("--build-lib", str(folder), "--build-temp", str(folder))
    return [sys.executable, "setup.py", "-q", "build_ext", *places]


@every_build
def test_the_best_build_is_chosen(variant: str) -> None:
    """Intel's processors without AMX do not gain by pairs of bfloat16."""
    kernels_of(variant)
    best = [name for name in library.VARIANTS if name in RUNNING]
    if best[0] == "avx512bf16" and "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        best.pop(0)
    found = find_kernels()
    assert isinstance(found, Kernels)
    assert found.variant == best[0]


@every_build
def test_a_build_of_other_sources_is_refused(tmp_path: Path, variant: str) -> None:
    kernels_of(variant)
    shutil.copytree(FOLDER, tmp_path / "cpu")
    assert isinstance(find_kernels(tmp_path / "cpu", (variant,)), Kernels)
    with (tmp_path / "cpu" / "source" / "team.c").open("a") as file:
        file.write("\n")
    refused = find_kernels(tmp_path / "cpu", (variant,))
    assert isinstance(refused, NoKernels)
    assert "install the project again" in refused.reason


def test_without_a_compiler_the_project_is_installed_all_the_same(tmp_path: Path) -> None:
    environment = os.environ | {"CC": shutil.which("false") or "false"}
    done = subprocess.run(
        build_in(tmp_path), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.rglob("*.so"))


def test_every_build_is_looked_for() -> None:
    for variant in library.VARIANTS:
        assert f'"{variant}"' in (ROOT / "setup.py").read_text()


def test_a_file_that_is_no_library_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / f"_processor{library.EXTENSION_SUFFIXES[0]}"
    broken.write_bytes(b"nothing")
    refused = find_kernels(tmp_path)
    assert isinstance(refused, NoKernels)
    assert broken.name in refused.reason


@every_build
def test_a_build_for_another_processor_is_not_opened(tmp_path: Path, variant: str) -> None:
    """Even the first instruction could be one that this processor does not have."""
    kernels_of(variant)
    suffix = library.EXTENSION_SUFFIXES[0]
    shutil.copy(FOLDER / f"_processor{suffix}", tmp_path)
    (tmp_path / f"_another{suffix}").write_bytes(b"would be an error if it were opened")
    refused = find_kernels(tmp_path, ("another",))
    assert isinstance(refused, NoKernels)
    assert "no kernels were compiled for this processor" in refused.reason


def test_each_build_has_its_own_objects(tmp_path: Path) -> None:
    """The builds are compiled at the same time, from the same files. An object of another build would be for another
    processor."""
    compiler = tmp_path / "cc"
    log = tmp_path / "log"
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >>{log}\nfor last; do [ "$before" = -o ] && : >"$last"; before=$last; done\n'
    )
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "LDSHARED": str(compiler)}
    subprocess.run(
        build_in(tmp_path), cwd=ROOT, env=environment, check=True, capture_output=True, timeout=120
    )
    asking = [line for line in log.read_text().splitlines() if "processor.c" in line]
    assert asking
    assert not any("-mavx" in line for line in asking), "what asks the processor must run on all"
    made = [words[words.index("-o") + 1] for line in log.read_text().splitlines() if (words := line.split())]
    assert made
    assert len(set(made)) == len(made)


def test_the_child_of_a_fork_has_workers_of_its_own() -> None:
    """Runs in a process of its own, because pytest's process has other threads."""
    kernels_of(RUNNING[0] if RUNNING else "none")
    program = f"""
import os, torch
from engine.cpu.library import Workers, find_kernels
from engine.cpu.matrix import PackedLinears
weight, x = torch.randn(64, 32), torch.randn(9, 32)
for variant in {RUNNING}:
    linear = PackedLinears(Workers(find_kernels(variants=(variant,)), 3), rounds=False)(weight, None)
    expected = linear(x)
    child = os.fork()
    if child == 0:
        same = all(torch.equal(linear(x), expected) for _ in range(50))
        del linear
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(linear(x), expected)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


def test_without_builds_there_is_a_reason(tmp_path: Path) -> None:
    refused = find_kernels(tmp_path)
    assert isinstance(refused, NoKernels)
    assert "docs/platforms.md" in refused.reason


@every_build
def test_workers_come_and_go(variant: str) -> None:
    kernels = kernels_of(variant)
    for threads in (1, 2, 5):
        for _ in range(20):
            Workers(kernels, threads)
