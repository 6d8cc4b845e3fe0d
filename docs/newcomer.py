"""A newcomer's way with a stopwatch: chat, the session's pages on the console, a planted leak, the alert, whose page it
was, mended. `docs/watching.py` walks it and puts times and pictures into docs/first-steps.md."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from playwright.sync_api import Browser, FloatRect, ViewportSize

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.console.browser import Opened, chromium  # noqa: E402 - the path comes first

IMAGES = ROOT / "docs" / "images"
PICTURE: ViewportSize = {"width": 1100, "height": 620}
MARGIN = 14
"""Pixels above the alert's name."""
ALERT_TIMEOUT_S = 120.0
LOOK_S = 0.1
ALERT = "KedgeLeakedPages"
FAULTS = "/v1/kedge/debug/faults"
TABLE = re.compile(r"(<!-- newcomer -->\n).*?(\n\n)", re.DOTALL)

Step = tuple[float, str]
"""Seconds since the way began, and what was seen then."""


class Stopwatch:
    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self.steps: list[Step] = []

    def note(self, seen: str) -> None:
        self.steps.append((time.monotonic() - self._began_s, seen))

    def note_when(self, holds: Callable[[], bool], seen: str) -> None:
        deadline_s = time.monotonic() + ALERT_TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline_s:
                sys.exit(f"not within {ALERT_TIMEOUT_S:.0f} s: {seen}")
            time.sleep(LOOK_S)
        self.note(seen)


def walk(url: str, prometheus_url: str, watch: Stopwatch) -> None:
    """Takes two pictures on its way. Nothing is leaked and no alert fires before or after."""
    with httpx.Client(base_url=url, timeout=60.0) as client, chromium() as browser:
        opened = Opened(browser, url).live()
        opened.page.set_viewport_size(PICTURE)
        opened.page.get_by_label("Session", exact=True).fill("newcomer")
        opened.say("My dog is called Rex.")
        watch.note("the first chat is answered, and its pages are on the console")
        client.post(FAULTS, json={"kind": "leak_page", "for_s": 600}).raise_for_status()
        watch.note("a page of the session is leaked on purpose")
        watch.note_when(lambda: fires(prometheus_url), f"`{ALERT}` fires")
        opened.page.screenshot(path=IMAGES / "leak-console.png")
        opened.close()
        picture_alert(browser, prometheus_url)
        audited = client.get("/v1/kedge/audit").json()["replicas"]
        (finding,) = (each for replica in audited for each in replica["findings"])
        last = finding["last"]
        watch.note(
            f"the audit names page {finding['page']}, session `{last['session']}` and what it did last"
        )
        client.delete(FAULTS).raise_for_status()
        watch.note_when(lambda: not fires(prometheus_url), "mended; the alert is over")


def picture_alert(browser: Browser, prometheus_url: str) -> None:
    page = browser.new_page(viewport=PICTURE)
    page.goto(f"{prometheus_url}/classic/alerts")
    alert = page.get_by_text(ALERT).first
    alert.click()
    box = alert.bounding_box()
    assert box is not None
    # Above it are other alerts, and the path of the rules on this machine.
    top = box["y"] - MARGIN
    clip: FloatRect = {"x": 0, "y": top, "width": PICTURE["width"], "height": PICTURE["height"] - top}
    page.screenshot(path=IMAGES / "leak-alert.png", clip=clip)
    page.close()


def fires(prometheus_url: str) -> bool:
    alerts = httpx.get(f"{prometheus_url}/api/v1/alerts").json()["data"]["alerts"]
    return any(each["labels"]["alertname"] == ALERT and each["state"] == "firing" for each in alerts)


def with_table(text: str, steps: list[Step]) -> str:
    """The page with the table after its mark replaced."""
    rows = [f"| {seconds:.0f} s | {seen} |" for seconds, seen in steps]
    return TABLE.sub(lambda found: found[1] + "\n".join(["| after | |", "|---|---|", *rows]) + found[2], text)
