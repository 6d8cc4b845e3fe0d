"""Takes the console's pictures anew: `python docs/screenshots.py [URL]`, of a server that has just started on an empty
state directory. It needs Chromium and the development tools. Writes docs/images/console.png and console-narrow.png."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.console.browser import Opened, chromium  # noqa: E402 - the path comes first

IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 150 * 1024
PICTURE = {"width": 1100, "height": 680}
WHOLE_KV = "KV 192 KiB"
"""Of the chat's two turns. A heartbeat, at most a second later, tells it."""
OTHERS = (
    ("support-1041", "acme"),
    ("support-1042", "acme"),
    ("notes", "umbrella"),
    ("agent-7", ""),
    ("agent-8", ""),
)


def talk(url: str) -> None:
    """Sessions of some tenants, of different lengths."""
    with httpx.Client(base_url=url, timeout=60.0) as client:
        for number, (session, tenant) in enumerate(OTHERS):
            headers = {"x-session-id": session} | ({"x-tenant-id": tenant} if tenant else {})
            for turn in range(number + 1):
                said = f"My dog is called Rex, and this is message {turn}. " * (3 * number + 1)
                body = {"messages": [{"role": "user", "content": said}], "max_tokens": 40, "temperature": 0}
                client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()


def take(url: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    with chromium() as browser:
        opened = Opened(browser, url).live()
        page = opened.page
        page.get_by_label("Session", exact=True).fill("rex")
        page.get_by_label("Most tokens").fill("40")
        opened.say("My dog is called Rex.")
        opened.say("What is my dog called?")
        page.get_by_role("button", name="rex", exact=True).first.click()
        page.locator("#turns li").first.wait_for()
        page.get_by_text(WHOLE_KV).wait_for()
        page.set_viewport_size(PICTURE)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.screenshot(path=IMAGES / "console.png")
        opened.close()
        narrow = Opened(browser, url, narrow=True, dark=True).live()
        narrow.page.locator("#rows .session-name").first.wait_for()
        narrow.page.screenshot(path=IMAGES / "console-narrow.png")
        narrow.close()
    for path in sorted(IMAGES.glob("console*.png")):
        size = path.stat().st_size
        assert size < MOST_BYTES, f"{path.name} has {size} bytes: too many for the repository"


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    talk(url)
    take(url)


if __name__ == "__main__":
    main()
