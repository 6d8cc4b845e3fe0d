"""The console in a real browser. Without Chromium its tests are skipped, and a run with CI set fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.console.browser import Opened, chromium, chromium_path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for one file only: while Playwright runs, its event loop blocks tests that have a loop of their own."""
    if chromium_path() is None:
        pytest.skip("no Chromium")
    with chromium() as browser:
        yield browser


@pytest.fixture
def console(browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Opens the console of a server. At the end no console may have had a fault or called another server."""
    opened: list[Opened] = []

    def open_console(url: str, **options: Any) -> Opened:
        opened.append(Opened(browser, url, **options))
        return opened[-1]

    yield open_console
    for each in opened:
        each.close()
    assert [each.faults for each in opened] == [[] for _ in opened]
    assert [each.foreign for each in opened] == [[] for _ in opened]
