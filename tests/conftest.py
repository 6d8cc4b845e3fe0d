"""Settings for every test. Without a GPU, kernels run in Triton's interpreter. torch computes on one thread. Programs
that tests start can be interrupted. In continuous integration a test may be skipped only for a reason listed here."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def pytest_configure() -> None:
    """One thread, because such small models are slower on many, and so that sums keep one order. SIGINT is not ignored:
    a shell starts background jobs with SIGINT ignored, and children would inherit that."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the process ends: no collection of garbage looks through it."""
    gc.collect()
    gc.freeze()


COMPUTING = (
    "parity",
    "property",
    "simulation",
    "unit/assets",
    "unit/cache",
    "unit/engine",
    "unit/serving/grammars",
    "unit/serving/settings",
    "unit/serving/text",
)
"""Folders whose tests only compute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = [Path(__file__).parent / name for name in COMPUTING]
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            item.add_marker(pytest.mark.computes)


EXPLAINED_SKIPS = MappingProxyType(
    {
        "no GPU": "the machine has none; benchmarks/measured/h200.md, 'On a card', runs them",
        "needs two GPUs": "as above",
        "has a GPU": "the other half of a pair: one of the two runs on every machine",
        "kernels write to a card here": "runs where kernels are interpreted",
        "needs a network": "nobody reaches a machine without one",
        "no npm": "Node.js is no part of the project; command-line agents of tests/clients are from npm",
        "npm's registry cannot be reached": "nor is what it has",
        "Python's package index cannot be reached": "the Python clients of tests/clients are installed from there",
    }
)
"""Why continuous integration may skip a test, by the reason that the test gives."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In continuous integration a skip without an explanation is a failure: something was not installed."""
    if os.environ.get("CI") and set(_skips(session.config)) - set(EXPLAINED_SKIPS):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    del exitstatus
    skips = _skips(config)
    if skips:
        terminalreporter.section("skipped, and why that is fine")
    for reason, count in skips.most_common():
        terminalreporter.line(f"{count:5} {reason}: {EXPLAINED_SKIPS.get(reason, 'NOT EXPLAINED')}")


def _skips(config: pytest.Config) -> Counter[str]:
    """How many tests were skipped, by reason."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [] if reporter is None else reporter.stats.get("skipped", [])
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
