"""The console in Chromium with a whole service in this process: what it shows, and what clicks and keys do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from serving.keys import API_KEYS, OPERATOR_KEYS, KeyRing
from tests.console.browser import Opened
from tests.unit.cache.planted_faults import plant
from tests.unit.serving.replica_rig import REPLICA_ID
from tests.unit.serving.served_service import ServedService, served_service

Open = Callable[..., Opened]
RING = KeyRing({API_KEYS: "key-a=acme", OPERATOR_KEYS: "key-o"})
EVIL = "<img/src=x/onerror=alert(1)>"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedService]:
    with served_service(tmp_path) as served:
        yield served


def row(page: Page, session: str) -> dict[str, str]:
    """A session's row, by column."""
    line = page.locator("#rows tr").filter(has=page.get_by_role("button", name=session, exact=True))
    expect(line).to_have_count(1)
    return dict(
        zip(page.locator("#columns th").all_inner_texts(), line.locator("td").all_inner_texts(), strict=True)
    )


def figure(text: str) -> int:
    return int(text.split()[0].replace(",", ""))


def chosen(page: Page, session: str) -> None:
    page.get_by_role("button", name=session, exact=True).first.click()
    expect(page.locator("#history-title")).to_contain_text(session)


def test_it_shows_every_page_of_a_replica(served: ServedService, console: Open) -> None:
    page = console(served.address).live().page
    replica = page.get_by_role("article", name=f"Replica {REPLICA_ID}")
    expect(replica.locator(".state")).to_have_text("up")
    bar = replica.get_by_role("img")
    expect(bar).to_have_attribute(
        "aria-label",
        "full pool, 256 pages: 0 session, 0 in flight, 0 protected, 0 cached, 256 free, 0 leaked",
    )
    expect(page.locator("#alarm")).to_be_hidden()
    expect(page.locator("#events li").first).to_contain_text(f"replica up{REPLICA_ID}")


def test_a_turn_shows_its_effect(served: ServedService, console: Open) -> None:
    opened = console(served.address).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("20")
    session = page.get_by_label("Session", exact=True).input_value()
    opened.say("Hello, my dog is called Rex.")
    opened.say("What is my dog called?")
    first, second = opened.effects()
    assert first["cached"].startswith("0 ")
    # The cache had all of the first turn, or all but its last token.
    of_first = figure(first["prompt"]) + figure(first["answer"])
    assert figure(second["cached"]) in (of_first, of_first - 1)
    assert first["KV pages"].startswith("0 → ")
    before, after = (int(pages) for pages in second["KV pages"].split(" → "))
    assert first["KV pages"] == f"0 → {before}"
    assert after > before > 0
    assert second["at"] == f"{REPLICA_ID}, device, epoch 1"
    told = row(page, session)
    assert (told["Turns"], told["Tier"], int(told["Pages"])) == ("2", "device", after)
    chosen(page, session)
    expect(page.locator("#turns li")).to_have_count(2)
    expect(page.locator("#turns li").first).to_contain_text("Hello, my dog is called Rex.")
    expect(page.locator("#events li").first).to_contain_text(f"opened{session}")


def test_forks_rewinds_and_the_end_by_click(served: ServedService, console: Open) -> None:
    opened = console(served.address).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("8")
    name = page.get_by_label("Session", exact=True)
    session = name.input_value()
    opened.say("One.")
    one = figure(row(page, session)["Tokens"])
    opened.say("Two.")
    chosen(page, session)
    page.get_by_role("button", name="Fork here, turn 0").click()
    expect(page.locator("#history-said")).to_contain_text(f"has {one} tokens")
    fork = name.input_value()
    assert fork != session, "the chat goes on in the fork"
    expect(page.get_by_role("button", name=fork, exact=True).first).to_be_visible()
    assert figure(row(page, fork)["Tokens"]) == one
    page.get_by_role("button", name="Rewind to here, turn 0").click()
    expect(page.locator("#turns li")).to_have_count(2)  # it asks first: what is taken back is lost
    page.get_by_role("button", name="Really rewind?, turn 0").click()
    expect(page.locator("#history-said")).to_have_text(f"Rewound: {one} tokens are left.")
    expect(page.locator("#history-facts")).to_contain_text(f"{one} tokens")
    page.get_by_role("button", name="Close it").click()
    assert row(page, session), "it asks first"
    page.get_by_role("button", name="Really close it?").click()
    expect(page.locator("#rows tr")).to_have_count(1)
    expect(page.locator("#history")).to_be_hidden()
    expect(page.locator("#events li").first).to_contain_text(f"closed{session}")


def test_a_request_of_a_tree_offers_nothing_that_would_end_the_tree(
    served: ServedService, console: Open
) -> None:
    """Its buttons used to act on the whole tree: "Close it" deleted every request."""
    with httpx.Client(base_url=served.address) as client:
        tree = client.post("/open_session", json={"capacity_of_str_len": 1000}).json()
        body = {"input_ids": [1, 2, 3], "rid": "first", "sampling_params": {"max_new_tokens": 2}}
        assert client.post("/generate", json=body | {"session_params": {"id": tree}}).status_code == 200
    page = console(served.address).live().page
    chosen(page, f"{tree} · first")
    buttons = page.locator("#history-buttons")
    expect(buttons.get_by_role("button", name="Hide")).to_be_visible()
    for name in ("Chat in it", "Fork", "Close it"):
        expect(buttons.get_by_role("button", name=name)).to_be_hidden()


def test_an_answer_with_as_many_tokens_as_it_may_have_is_not_called_complete(
    served: ServedService, console: Open
) -> None:
    opened = console(served.address).live()
    opened.page.get_by_label("Most tokens").fill("3")
    opened.say("Tell me a story.")
    expect(opened.page.locator("#chat-said")).to_have_text(
        "The answer was cut off: it may have no more tokens."
    )
    (effect,) = opened.effects()
    assert effect["answer"] == "3 tokens, cut off"


def test_an_event_of_a_session_that_has_ended_says_so(served: ServedService, console: Open) -> None:
    """Only a screen reader was told: for everybody else a click did nothing."""
    service = served.service
    for name in ("gone", "here"):
        served.run(service.open_session(name, timeout_s=None, capacity_tokens=None, tenant=""))
    served.run(service.close_session("gone", tenant=""))
    page = console(served.address).live().page
    event, said = page.locator("#events"), page.locator("#events-said")
    event.get_by_role("button", name="gone", exact=True).first.click()
    expect(said).to_be_visible()
    expect(said).to_contain_text("Session gone has ended")
    event.get_by_role("button", name="here", exact=True).first.click()
    expect(said).to_be_hidden()


def test_pages_whose_size_is_not_known_yet_are_not_said_to_be_empty(
    served: ServedService, console: Open
) -> None:
    """A row had 114 pages on the device, and 0 B of KV: owners tell the size after a turn, and pages at once."""
    page = console(served.address).live().page
    rows = [{"size_bytes": 0, "kv_pages": pages} for pages in (114, 0, None)]
    told = page.evaluate("rows => import('/console/dom.js').then(({sizeOfKv}) => rows.map(sizeOfKv))", rows)
    assert told == ["–", "0 B", "–"]


def test_an_event_of_a_request_of_a_tree_leads_to_the_request(served: ServedService, console: Open) -> None:
    """The page said that the session was not among those that were used last."""
    with httpx.Client(base_url=served.address) as client:
        tree = client.post("/open_session", json={"capacity_of_str_len": 1000}).json()
        body = {"input_ids": [1, 2, 3], "rid": "first", "sampling_params": {"max_new_tokens": 2}}
        assert client.post("/generate", json=body | {"session_params": {"id": tree}}).status_code == 200
    page = console(served.address).live().page
    page.locator("#events").get_by_role("button", name=f"{tree} · first", exact=True).first.click()
    expect(page.locator("#history-title")).to_have_text(f"Session {tree} · first")


def test_a_message_shows_its_words_and_its_calls(served: ServedService, console: Open) -> None:
    """The calls of a message that had words, too, were not shown."""
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"dog": "Rex"}'}}
    messages = [
        {"role": "user", "content": "Where is Rex?"},
        {"role": "assistant", "content": "I look it up.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "In the garden."},
    ]
    reply = httpx.post(
        f"{served.address}/v1/chat/completions",
        json={"messages": messages, "max_tokens": 2},
        headers={"x-session-id": "dogs"},
    )
    assert reply.status_code == 200, reply.text
    page = console(served.address).live().page
    chosen(page, "dogs")
    asked = page.locator("#turns .message.assistant").first
    expect(asked).to_contain_text("I look it up.")
    expect(asked).to_contain_text("look_up")


def test_sessions_are_sorted_and_filtered(served: ServedService, console: Open) -> None:
    service = served.service
    for name, tenant in (("ab", "acme"), ("bc", "other"), ("cd", "acme")):
        served.run(service.open_session(name, timeout_s=None, capacity_tokens=None, tenant=tenant))
    page = console(served.address).live().page
    names = page.locator("#rows .session-name")
    expect(names).to_have_count(3)
    header = page.get_by_role("columnheader", name="Session")
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "ascending")
    assert names.all_inner_texts() == ["ab", "bc", "cd"]
    header.get_by_role("button").click()
    expect(header).to_have_attribute("aria-sort", "descending")
    assert names.all_inner_texts() == ["cd", "bc", "ab"]
    page.get_by_label("Filter").fill("ACME")
    expect(names).to_have_count(2)
    expect(page.locator("#sessions-count")).to_have_text("2 of 3")
    page.get_by_label("Filter").fill("nobody")
    expect(page.locator("#no-rows")).to_be_visible()


def test_everything_works_by_keyboard(served: ServedService, console: Open) -> None:
    opened = console(served.address).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("5")
    opened.say("One.")
    opened.close()
    page = console(served.address).live().page
    page.locator("#rows .session-name").first.wait_for()
    reached = list[str]()
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            "[document.activeElement.id || document.activeElement.textContent.trim(),"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if name in reached or page.evaluate("document.activeElement === document.body"):
            break
        assert outline != "none", f"{name}: where the focus is cannot be seen"
        reached.append(name)
    session = page.locator("#rows .session-name").first.inner_text()
    for wanted in (
        "Skip to the sessions",
        "Skip to the chat",
        "key-button",
        "filter",
        session,
        "chat-text",
        "chat-send",
        "kinds",
    ):
        assert wanted in reached, (wanted, reached)
    page.locator("#rows .session-name").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Fork here, turn 0")).to_be_visible()
    page.get_by_role("link", name="Skip to the chat").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#chat-text")).to_be_focused()
    page.keyboard.type("Two.")
    page.keyboard.press("Control+Enter")
    expect(page.locator("dl.effect")).to_have_count(1)
    expect(page.locator("#chat-said")).to_contain_text("The answer was cut off")
    page.locator("#key-button").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#key-dialog")).to_be_hidden()


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_on_a_narrow_screen(served: ServedService, console: Open, dark: bool) -> None:
    opened = console(served.address, narrow=True, dark=dark).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("20")
    page.get_by_label("Session", exact=True).fill("a-session-with-a-very-long-name-" * 6)
    opened.say("A-word-that-is-longer-than-the-screen-is-wide-" * 3)
    assert opened.overflow_px == 0
    page.locator("#rows .session-name").first.click()
    page.locator("#turns li").first.wait_for()
    assert opened.overflow_px == 0
    page.get_by_label("Sort by").select_option("tokens")
    assert page.get_by_role("columnheader", name="Tokens").get_attribute("aria-sort") == "ascending"
    assert page.locator("#columns button").evaluate_all("heads => heads.every((head) => head.tabIndex < 0)")
    page.locator("#key-button").click()
    page.locator("#key").wait_for()
    assert opened.overflow_px == 0


def test_a_key_is_asked_for_where_there_are_keys(tmp_path: Path, console: Open) -> None:
    with served_service(tmp_path, keys=RING) as served:
        opened = console(served.address)
        page = opened.page
        said, key = page.locator("#key-said"), page.locator("#key")
        for wrong, then in (("nobodys", "Send a key that is valid here"), ("key-a", "This is for operators")):
            expect(said).to_contain_text("Send a key that is valid here")
            key.fill(wrong)
            page.keyboard.press("Enter")
            expect(key).to_have_value("")
            expect(said).to_contain_text(then)
        page.locator("#key").fill("key-o")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#link")).to_have_text("live")
        assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [
            ["key-o"],
            0,
            "",
        ]
        opened.close()


def test_escape_puts_the_question_for_a_key_off(tmp_path: Path, console: Open) -> None:
    with served_service(tmp_path, keys=RING) as served:
        opened = console(served.address)
        page, dialog = opened.page, opened.page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.clock.install()
        calls = list[str]()
        page.on("request", lambda request: calls.append(request.url))
        page.keyboard.press("Escape")
        page.clock.run_for("02:00")
        expect(dialog).to_be_hidden()
        expect(page.locator("#link")).to_have_text("a key is needed")
        assert calls == []
        page.locator("#key-button").click()
        page.locator("#key").fill("key-o")
        page.keyboard.press("Enter")
        page.clock.resume()
        page.clock.run_for("00:10")
        expect(page.locator("#link")).to_have_text("live")
        opened.close()


def test_a_leak_screams_and_the_culprit_is_named(served: ServedService, console: Open) -> None:
    opened = console(served.address).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("20")
    session = page.get_by_label("Session", exact=True).input_value()
    opened.say("Hello.")
    expect(page.locator("#alarm")).to_be_hidden()
    engine = served.service.rig.engine

    async def leak() -> int:
        return await asyncio.wrap_future(engine._call(lambda: plant(engine._cache, "leak", session)))  # type: ignore[attr-defined]

    leaked = served.run(leak())
    expect(page.get_by_role("alert")).to_contain_text(f"LEAKED: 1 page of pool full at replica {REPLICA_ID}")
    event = page.locator("#events li.audit").first
    expect(event).to_contain_text(f"page {leaked} of pool full is leaked")
    expect(event).to_contain_text(session)


def test_what_clients_say_is_text(served: ServedService, console: Open) -> None:
    opened = console(served.address).live()
    page = opened.page
    page.get_by_label("Most tokens").fill("5")
    page.get_by_label("Session", exact=True).fill(EVIL)
    opened.say(EVIL)
    chosen(page, EVIL)
    expect(page.locator("#turns li").first).to_contain_text(EVIL)
    assert page.locator("img").count() == 0


def test_a_refused_turn_says_why(served: ServedService, console: Open) -> None:
    page = console(served.address).live().page
    page.get_by_label("Message").fill("word " * 2000)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-said")).to_contain_text("512")
    expect(page.locator("dl.effect")).to_contain_text("512")  # where it stays when the next turn is sent
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
