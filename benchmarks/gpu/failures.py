"""A plugin of pytest that prints each failure when it happens. pytest's own list comes at the end, which a time limit
may cut off."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid}, {report.when}:\n{report.longreprtext}", flush=True)
