"""An installed headless Chromium (for example Debian's package), driven by Playwright. Playwright downloads no browser
here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

WAIT_MS = 30_000
"""Time limit for what must happen soon, even on a busy machine."""
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 360, "height": 740}


def chromium_path() -> str | None:
    """The path of Chromium; None if it is not installed."""
    named = os.environ.get("KEDGE_CHROMIUM")
    return (
        named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    )


@contextmanager
def chromium() -> Iterator[Browser]:
    path = chromium_path()
    assert path is not None
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(OPTIONS))
        try:
            yield browser
        finally:
            browser.close()


class Opened:
    """The console in a tab of its own. `faults` lists errors of the browser and of the page's scripts, including
    violations of the page's content policy. `foreign` lists the page's requests to other servers."""

    def __init__(self, browser: Browser, url: str, *, dark: bool = False, narrow: bool = False) -> None:
        self.context = browser.new_context(
            viewport=NARROW if narrow else WIDE, color_scheme="dark" if dark else "light"
        )
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.faults: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._said)
        self.page.on(
            "request", lambda call: None if call.url.startswith(url) else self.foreign.append(call.url)
        )
        self.page.goto(f"{url}/console")

    def _said(self, message: ConsoleMessage) -> None:
        # The browser reports a failed call as an error. The page has to show it; it is no fault of a script.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def live(self) -> Opened:
        """Waits until the page shows the cluster."""
        self.page.locator("#link[data-is=up]").wait_for()
        return self

    def say(self, text: str) -> None:
        """Sends a message in the chat and waits until the page shows its effect."""
        told = self.page.locator("dl.effect").count()
        self.page.get_by_label("Message").fill(text)
        self.page.get_by_role("button", name="Send").click()
        effect = self.page.locator("dl.effect").nth(told)
        effect.get_by_text("at", exact=True).wait_for()

    def effects(self) -> list[dict[str, str]]:
        """The effect of each turn of the chat, by name of the figure."""
        return [
            dict(zip(each.locator("dt").all_inner_texts(), each.locator("dd").all_inner_texts(), strict=True))
            for each in self.page.locator("dl.effect").all()
        ]

    @property
    def overflow_px(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(
            self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )

    def close(self) -> None:
        if not self.page.is_closed():
            self.context.close()
