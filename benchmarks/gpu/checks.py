"""The test suites of kernels, attention, engine and parity, on the card: counts and the first failures."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks.gpu.rows import failed, skipped
from benchmarks.gpu.stage import Stage

ROOT = Path(__file__).resolve().parents[2]
SUITES = (
    "tests/unit/engine/kernels",
    "tests/unit/engine/attention",
    "tests/unit/engine/runner",
    "tests/parity",
    "tests/unit/engine/models",
    "tests/unit/engine",
    "tests/property",
)
"""The least important come last: the time limit may cut them off. tests/unit/engine leaves out the folders above."""

DRY_SUITES = ("tests/unit/engine/test_device.py",)
COUNTS_OVER_A_FILE = "tests/parity/test_matrix.py::test_the_cells_cover_what_they_should"
"""Counts over all tests of its file, which several workers share."""

FAILURES_SHOWN = 4
TAIL_CHARACTERS, FAILURE_CHARACTERS = 1500, 60_000
ONE_TEST_S = 240
WORKERS = min(16, os.cpu_count() or 1)
WORKER_THREADS = "2"
"""Threads of torch on the host. Otherwise every worker would take all cores for its references."""


class Counts(NamedTuple):
    passed: int
    failed: int
    skipped: int
    failures: list[str]


def run(stage: Stage) -> None:
    given = [name for name in stage.options.tests.split(",") if name]
    suites = given or (DRY_SUITES if stage.dry else SUITES)
    done: list[str] = []
    for suite in suites:
        missing = [name for name in suite.split() if not (ROOT / name.partition("::")[0]).exists()]
        if missing:
            stage.out.add(skipped(stage.section, suite, f"no such path: {missing[0]}"))
            continue
        run_suite(stage, suite, [name for name in done if name.startswith(f"{suite}/")])
        done.append(suite)


def pytest_command(stage: Stage, suite: str, without: list[str], file: Path) -> list[str]:
    """`file` gets the JUnit report. A card that is broken must not take the rest of its time."""
    command = [sys.executable, "-m", "pytest", *suite.split(), "-v", "--tb=short", "--maxfail=40"]
    command += ["--continue-on-collection-errors"]  # the machine may lack a package that few tests need
    command += ["-p", "no:cacheprovider", f"--junit-xml={file}", "-o", "addopts="]
    command += ["-p", "benchmarks.gpu.failures"]
    command += [f"--ignore={name}" for name in without]
    if not stage.dry and importlib.util.find_spec("xdist") is not None:
        # Kernels compile on the host.
        command += ["-n", str(WORKERS), "--dist", "worksteal", "--deselect", COUNTS_OVER_A_FILE]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command += [f"--timeout={ONE_TEST_S}"]
    if importlib.util.find_spec("pytest_asyncio") is None:
        command += ["-W", "ignore::pytest.PytestConfigWarning"]
    return command


def run_suite(stage: Stage, suite: str, without: list[str]) -> None:
    if stage.left_s < 1:
        stage.out.add(skipped(stage.section, suite, "no time left"))
        return
    begin_s = time.monotonic()
    file = stage.out.path.with_suffix(f".{re.sub(r'[^a-z0-9]+', '_', suite)[:100]}.xml")
    command = pytest_command(stage, suite, without, file)
    environment = {**os.environ, "KEDGE_TEST_DEVICE": "cpu" if stage.dry else "cuda"}
    environment["OMP_NUM_THREADS"] = WORKER_THREADS
    try:
        answer = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=stage.left_s,
            check=False,
        )
        status, output = answer.returncode, answer.stdout + answer.stderr
    except subprocess.TimeoutExpired as cut:
        status, output = None, (cut.stdout or b"").decode(errors="replace")
    passed = output.count(" PASSED ")
    wrong = [line for line in output.splitlines() if " FAILED " in line or " ERROR " in line]
    shown = FAILURE_CHARACTERS if wrong else TAIL_CHARACTERS
    print("\n".join([*wrong, output[-shown:]]), flush=True)
    spent_s = time.monotonic() - begin_s
    if status is None:
        reason = f"not done after {spent_s:.0f} s: {passed} passed, {len(wrong)} failed"
        stage.out.add(failed(stage.section, suite, reason))
        return
    counts = read_counts(file)
    if counts is None or status not in (0, 1):
        stage.out.add(failed(stage.section, suite, f"status {status}: {_last_line(output)}"))
        return
    total = counts.passed + counts.failed
    note = f"{counts.skipped} skipped, {spent_s:.0f} s" + "".join(f"; {name}" for name in counts.failures)
    stage.row(
        suite, counts.passed, "passed", limit=total, share=counts.passed / total if total else None,
        target=1.0, note=note, details={"failed": counts.failed, "output": output[-6000:]},
    )  # fmt: skip


def read_counts(path: Path) -> Counts | None:
    """Reads the counts from pytest's own JUnit file; None if it wrote none."""
    try:
        suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError, StopIteration):
        return None
    total, missed = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    wrong = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    failures: list[str] = []
    for case in suite.iter("testcase"):
        for kind in ("failure", "error"):
            if (problem := case.find(kind)) is not None and len(failures) < FAILURES_SHOWN:
                failures.append(f"{case.get('name')}: {(problem.get('message') or '')[:120]}")
    return Counts(total - missed - wrong, wrong, missed, failures)


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
