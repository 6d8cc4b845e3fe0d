"""The console where something is wrong, old or rare: what can be seen, read and reached then."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Route, expect

from serving.front.cluster_watch import MOST_WATCHERS
from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from tests.console.browser import Opened
from tests.unit.serving.cli.watched_server import PAGES, Event, happened, replica, session, state
from tests.unit.serving.served_service import ServedService, served_service

Open = Callable[..., Opened]
SEEN = """seen => {
  Object.defineProperty(document, "hidden", {get: () => !seen, configurable: true});
  document.dispatchEvent(new Event("visibilitychange"));
}"""
FAINT = """() => {
  const channels = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
    return colour.startsWith("color(srgb") ? [r, g, b, a] : [r / 255, g / 255, b / 255, a];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((each, index) => each * a + below[index] * (1 - a));
  const linear = (each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => {
    const [r, g, b] = colour.map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const ground = (element) => {
    if (element === null) return [1, 1, 1];
    return over(channels(getComputedStyle(element).backgroundColor), ground(element.parentElement));
  };
  const faint = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (!element.checkVisibility({visibilityProperty: true}) || element.disabled) continue;
    const style = getComputedStyle(element);
    const told = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const field = element.matches("input, select, textarea");
    const parts = [];
    if (told) parts.push([style.color, element, 4.5]);
    if (field) parts.push([style.borderTopColor, element.parentElement, 3]);
    for (const [colour, on, least] of parts) {
      const found = contrast(over(channels(colour), ground(on)), ground(on));
      if (found < least) faint.push(`${element.tagName} ${element.className} ${element.id}: ${found.toFixed(2)}`);
    }
  }
  return [...new Set(faint)];
}"""
"""What is too faint to be read (WCAG 2.2, level AA): texts below 4.5, borders of fields below 3."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedService]:
    with served_service(tmp_path) as served:
        yield served


def show(opened: Opened, *told: Event) -> None:
    """Lets the page be told this in place of what the server says."""
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in told)

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=body)

    opened.page.unroute_all()
    opened.page.route("**/v1/kedge/watch?*", answer)


def a_replica(name: str, **changed: object) -> dict[str, object]:
    return replica(name, 100, answers=True, **changed)


def test_tabs_that_are_not_seen_leave_their_connections_to_others(
    served: ServedService, console: Open
) -> None:
    """A browser has six connections to a server for all its tabs. The seventh tab stayed empty."""
    opened = console(served.address).live()
    tabs = [opened.page]
    for _ in range(7):
        tabs[-1].evaluate(SEEN, False)
        expect(tabs[-1].locator("#link")).to_have_text("paused while not seen")
        tabs.append(opened.context.new_page())
        tabs[-1].goto(f"{served.address}/console")
        expect(tabs[-1].locator("#link")).to_have_text("live")
    served.run(served.service.open_session("late", timeout_s=None, capacity_tokens=None, tenant=""))
    tabs[0].evaluate(SEEN, True)
    expect(tabs[0].locator("#rows .session-name")).to_have_text("late")


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_can_be_read_and_fields_be_seen(served: ServedService, console: Open, dark: bool) -> None:
    """Warnings on white had a contrast of 2.7, a leak in dark colours 3.3, borders of fields 1.4."""
    opened = console(served.address, dark=dark)
    replicas = [a_replica("a"), a_replica("b", state="draining"), replica("c", 1, answers=False, pools={})]
    rows = [session("busy", in_turn=True), session("idle")]
    kinds = ("opened", "moved", "taken_over", "drained", "replica_down", "audit")
    events = [happened(1.0, kind, session="busy", tenant="", rid=None, replica="a") for kind in kinds]
    show(opened, state(1.0, replicas, rows), *events)
    opened.page.reload()
    opened.page.emulate_media(reduced_motion="reduce")
    opened.page.get_by_role("button", name="idle", exact=True).click()
    opened.page.locator("tr.chosen").hover()
    expect(opened.page.locator("#alarm")).to_be_visible()
    expect(opened.page.locator("#events li")).to_have_count(len(kinds))
    assert opened.page.evaluate(FAINT) == []


def test_pages_with_two_accounts_are_told_by_their_name(served: ServedService, console: Open) -> None:
    """ "LEAKED: -2 pages": the audit calls them doubly accounted."""
    opened = console(served.address)
    twice = {"full": PAGES | {"free": 43, "leaked": -2}}
    show(opened, state(1.0, [a_replica("a"), a_replica("b", pools=twice)], []))
    opened.page.reload()
    expect(opened.page.locator("#alarm")).to_have_text(
        "LEAKED: 1 page of pool full at replica a; DOUBLY ACCOUNTED: 2 pages of pool full at replica b. "
        "The events say which, and who had them last."
    )


def test_figures_of_a_replica_that_does_not_answer_are_said_to_be_old(
    served: ServedService, console: Open
) -> None:
    """They stood there as if they were of now."""
    opened = console(served.address)
    show(opened, state(1_700_000_000.0, [a_replica("a", waiting=1024)], []))
    opened.page.reload()
    load, bars = opened.page.locator(".load"), opened.page.locator(".bars")
    expect(load).to_have_text("3 running, 1,024 waiting, 7 sessions")
    show(opened, state(1_700_000_009.0, [replica("a", 1, state="suspect", answers=False, pools={})], []))
    expect(load).to_contain_text("As it was at")
    expect(load).to_contain_text("3 running, 1,024 waiting, 7 sessions")
    expect(bars).to_have_css("filter", "grayscale(1)")


def test_the_page_says_why_nothing_comes(served: ServedService, console: Open) -> None:
    """It said "not connected", whatever the server had answered."""
    with ExitStack() as others:
        client = others.enter_context(httpx.Client(base_url=served.address, limits=httpx.Limits()))
        for _ in range(MOST_WATCHERS):
            others.enter_context(client.stream("GET", "/v1/kedge/watch"))
        page = console(served.address).page
        expect(page.locator("#link")).to_have_text("not connected: 32 watch this front end already.")
    expect(page.locator("#link")).to_have_text("live")


def test_no_session_is_not_called_a_session_that_does_not_fit(served: ServedService, console: Open) -> None:
    opened = console(served.address).live()
    said = opened.page.locator("#no-rows")
    expect(said).to_have_text("There is no session.")
    _, told = state(1.0, [], [session("a")])
    show(opened, ("state", told | {"sessions": told["sessions"] | {"total": 2000}}))
    opened.page.reload()
    opened.page.get_by_label("Filter").fill("nobody")
    expect(said).to_have_text("No session fits, of the 1 that were used last.")


def test_a_long_tenant_leaves_its_label_on_one_line(served: ServedService, console: Open) -> None:
    """On a narrow screen the label had one letter on each line."""
    opened = console(served.address, narrow=True)
    show(opened, state(1.0, [a_replica("a")], [session("one", tenant="a-tenant-with-a-long-name-" * 6)]))
    opened.page.reload()
    label = opened.page.locator("td.tenant").evaluate("cell => getComputedStyle(cell, '::before').width")
    assert float(label.removesuffix("px")) > 30


def test_a_failed_turn_gives_its_words_back(served: ServedService, console: Open) -> None:
    """They had to be typed again."""
    page = console(served.address).live().page
    words = page.get_by_label("Message")
    words.fill("word " * 2000)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-said")).to_contain_text("512")
    expect(words).to_have_value("word " * 2000)


def test_a_turn_tells_nothing_in_the_talk_of_another_session(served: ServedService, console: Open) -> None:
    page = console(served.address).live().page
    held = list[Route]()
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    page.get_by_label("Message").fill("Hello.")
    with page.expect_request("**/v1/chat/completions"):
        page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-said")).to_have_text("Waiting for the first token.")
    page.get_by_role("button", name="New session").click()
    held[0].continue_()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.locator("#chat-said")).to_have_text("")


def test_who_reads_above_the_end_of_the_talk_stays_there(served: ServedService, console: Open) -> None:
    """Each piece of an answer scrolled to the end."""
    opened = console(served.address).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("60")
    page.evaluate("""() => {
      const talk = document.getElementById("talk");
      let pieces = 0;
      new MutationObserver((changes) => {
        if (changes.some((each) => each.target.parentElement.className === "message assistant")) pieces += 1;
        if (pieces === 1) talk.scrollTop = 0;
      }).observe(talk, {childList: true, subtree: true});
    }""")
    opened.say("a\n" * 60)
    talk = page.locator("#talk")
    assert talk.evaluate("talk => talk.scrollHeight > 2 * talk.clientHeight")
    assert talk.evaluate("talk => talk.scrollTop") == 0


def test_a_long_answer_does_not_hold_the_page_up(served: ServedService, console: Open) -> None:
    """Each piece laid out the whole answer: one of 4,000 pieces took minutes."""
    opened = console(served.address).live()
    pieces = [{"delta": {"content": f"word{number} "}} for number in range(6000)]
    told = [json.dumps({"choices": [each]}) for each in [*pieces, {"delta": {}, "finish_reason": "stop"}]]
    body = "".join(f"data: {each}\n\n" for each in [*told, "[DONE]"])
    opened.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    opened.page.get_by_label("Message").fill("Tell me a long story.")
    opened.page.get_by_role("button", name="Send").click()
    expect(opened.page.locator("#chat-said")).to_have_text("The answer is complete.")
    expect(opened.page.locator("#talk .assistant")).to_contain_text("word0 word1 ")
    expect(opened.page.locator("#talk .assistant")).to_contain_text("word5999")


def test_the_focus_follows_to_a_session_stays_in_it_and_comes_back(
    served: ServedService, console: Open
) -> None:
    """Up to 500 lines are between a session and what was said in it, and each new turn took the focus away."""
    turn = {"messages": [{"role": "user", "content": "One."}], "max_tokens": 2}
    named = {"x-session-id": "one", "x-session-mode": "append"}
    with httpx.Client(base_url=served.address, headers=named) as client:
        assert client.post("/v1/chat/completions", json=turn).status_code == 200
        page = console(served.address).live().page
        line, fork = page.locator("#rows .session-name"), page.get_by_role("button", name="Fork here, turn 0")
        line.focus()
        page.keyboard.press("Enter")
        expect(page.locator("#history")).to_be_focused()
        fork.focus()
        assert client.post("/v1/chat/completions", json=turn).status_code == 200
        expect(page.locator("#turns li")).to_have_count(2)
        expect(fork).to_be_focused()
        page.get_by_role("button", name="Hide").focus()
        page.keyboard.press("Enter")
        expect(line).to_be_focused()
        assert client.post("/close_session", json={"session_id": "one"}).status_code == 200
        expect(page.locator("#sessions")).to_be_focused()


def test_a_line_that_moves_with_the_focus_does_not_scroll_the_page(
    served: ServedService, console: Open
) -> None:
    """Who had clicked a session and read on further below was thrown back with each of its turns."""
    for name in ("a", "b", "c"):
        served.run(served.service.open_session(name, timeout_s=None, capacity_tokens=None, tenant=""))
    page = console(served.address, narrow=True).live().page
    lines = page.locator("#rows .session-name")
    expect(lines.first).to_have_text("c")
    lines.last.focus()
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    below = page.evaluate("scrollY")
    turn = {"messages": [{"role": "user", "content": "One."}], "max_tokens": 2}
    reply = httpx.post(f"{served.address}/v1/chat/completions", json=turn, headers={"x-session-id": "a"})
    assert reply.status_code == 200
    expect(lines.first).to_have_text("a")
    assert page.evaluate("[document.activeElement.textContent, scrollY > 0]") == ["a", below > 0]
    assert page.evaluate("scrollY") >= below - 200  # an event more or less moves the end


def test_a_key_that_no_header_can_have_is_not_taken(tmp_path: Path, console: Open) -> None:
    """The page never asked again, and said "not connected" for ever."""
    ring = KeyRing({API_KEYS: "key-a=acme", OPERATOR_KEYS: "key-o"})
    with served_service(tmp_path, keys=ring) as served:
        opened = console(served.address)
        page, key = opened.page, opened.page.locator("#key")
        key.fill("ключ")
        page.keyboard.press("Enter")
        assert key.evaluate("key => key.matches(':invalid')")
        expect(page.locator("#key-dialog")).to_be_visible()
        key.fill("key-o")
        page.keyboard.press("Enter")
        expect(page.locator("#link")).to_have_text("live")
        opened.close()
