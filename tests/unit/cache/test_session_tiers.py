"""SessionTiers: an idle session's KV goes to the host and back beside compute. Whatever happens to the session
meanwhile, every page and byte is settled once."""

from __future__ import annotations

import pytest

from cache.journal import Holder
from cache.session_cache import Room
from cache.slots import SlotState
from cache.tiers import CopyKind
from tests.unit.cache.books import PAGE_BYTES, WINDOW_PAGE_BYTES, Books, joined, tokens_from

SAVE, LOAD, DROP = CopyKind.SAVE, CopyKind.LOAD, CopyKind.DROP


def books_of(num_pages: int = 16, host_pages: int = 16, **options: int) -> Books:
    return Books.make(4, num_pages, host_pages=host_pages, **options)  # type: ignore[arg-type]


def demoted(books: Books, session_id: str, tokens: int = 15, first: int = 0) -> None:
    """Makes a session whose KV of `tokens` - 1 tokens lies only on the host."""
    books.run_turn(session_id, tokens_from(first, tokens))
    books.tiers.demote(books.slot(session_id))
    assert books.end_copies() == [SAVE]
    assert books.slot(session_id).state is SlotState.STORED


def test_to_the_host_and_back() -> None:
    books = books_of()
    books.run_turn("a", tokens_from(0, 15))
    pages = books.slot_kv("a").pages.tolist()
    books.tiers.demote(books.slot("a"))
    (save,) = books.take_orders()
    assert save.pages is not None
    assert (save.kind, save.pages.full.tolist()) == (SAVE, pages)
    accounts = books.host
    assert (accounts.used_bytes, accounts.sessions) == (4 * PAGE_BYTES, 1)
    assert books.slot("a").state is SlotState.SAVING
    assert books.accounts().session == 4, "until the copy is done"
    books.tiers.copy_done(save.key)
    books.check()
    assert (books.slot("a").state, books.accounts().free) == (SlotState.STORED, 16)
    assert books.sessions.held_tokens() == {"a": 14}
    match = books.match("a", tokens_from(0, 20))
    assert (match.prefix_len, match.elsewhere) == (14, True)
    assert books.sessions.promote("a") is Room.READY
    (load,) = books.take_orders()
    assert (load.kind, load.key) == (LOAD, save.key)
    assert books.slot("a").state is SlotState.LOADING
    assert books.match("a", tokens_from(0, 20)).loading, "not yet"
    assert books.sessions.promote("a") is Room.READY, "asking again changes nothing"
    assert books.take_orders() == []
    books.tiers.copy_done(load.key)
    books.check()
    assert [order.kind for order in books.take_orders()] == [DROP]
    kv = books.begin("a", tokens_from(0, 20))
    assert (kv.committed_len, kv.draft_len, kv.holder) == (14, 14, Holder("a", "r"))
    tiers = books.tiers
    assert (tiers.num_to_host, tiers.num_from_host, tiers.num_to_log) == (1, 1, 0)
    assert books.host.used_bytes == 0
    books.sessions.give_back(kv, "a", tokens_from(0, 20), 14)
    books.sessions.release_session("a")
    books.assert_empty()


@pytest.mark.parametrize("failed", [False, True])
def test_a_turn_takes_back_what_is_being_saved(failed: bool) -> None:
    books = books_of()
    books.run_turn("a", tokens_from(0, 15))
    books.tiers.demote(books.slot("a"))
    (save,) = books.take_orders()
    kv = books.begin("a", tokens_from(0, 20))
    books.check()
    assert kv.committed_len == 14
    assert books.host.used_bytes == 4 * PAGE_BYTES, "the copy still runs"
    books.tiers.copy_done(save.key, failed=failed)
    assert [order.kind for order in books.take_orders()] == [DROP] * (not failed)
    books.fill(kv, 19)
    books.sessions.finish_turn("a", kv, tokens_from(0, 20))
    books.check()
    assert books.sessions.held_tokens() == {"a": 19}
    assert (books.tiers.num_to_host, books.tiers.num_to_log) == (0, 0)
    books.sessions.release_session("a")
    books.assert_empty()


def test_a_save_from_before_a_turn_does_not_settle_the_one_after() -> None:
    books = books_of()
    books.run_turn("a", tokens_from(0, 15))
    books.tiers.demote(books.slot("a"))
    (first,) = books.take_orders()
    books.sessions.give_back(books.begin("a", tokens_from(0, 20)), "a", tokens_from(0, 20), 15)
    books.tiers.demote(books.slot("a"))
    (second,) = books.take_orders()
    books.tiers.copy_done(first.key)
    books.check()
    assert books.slot("a").state is SlotState.SAVING
    assert books.sessions.awaits_copies
    books.tiers.copy_done(second.key)
    books.check()
    assert not books.sessions.awaits_copies
    assert books.slot("a").state is SlotState.STORED
    assert [(order.kind, order.key) for order in books.take_orders()] == [(DROP, first.key)]
    assert books.host.used_bytes == 4 * PAGE_BYTES


@pytest.mark.parametrize("failed", [False, True])
def test_a_session_closed_while_it_is_saved(failed: bool) -> None:
    books = books_of()
    books.run_turn("a", tokens_from(0, 15))
    books.tiers.demote(books.slot("a"))
    (save,) = books.take_orders()
    books.sessions.release_session("a")
    books.check()
    assert books.accounts().free == 16, "nobody will look at the copy"
    books.tiers.copy_done(save.key, failed=failed)
    assert [order.kind for order in books.take_orders()] == [DROP] * (not failed)
    books.assert_empty()


@pytest.mark.parametrize("failed", [False, True])
def test_a_session_closed_while_it_is_loaded_keeps_its_pages_till_the_copy_ends(failed: bool) -> None:
    books = books_of()
    demoted(books, "a")
    books.sessions.promote("a")
    (load,) = books.take_orders()
    books.sessions.release_session("a")
    books.check()
    assert books.sessions.num_sessions == 0
    assert books.accounts().session == 4, "the copy writes to them"
    books.run_turn("a", tokens_from(500, 9))  # a new session of the same name
    books.tiers.copy_done(load.key, failed=failed)
    books.check()
    assert books.sessions.held_tokens() == {"a": 8}
    assert [order.kind for order in books.take_orders()] == [DROP]
    books.sessions.release_session("a")
    books.assert_empty()


def test_a_turn_that_needs_none_of_it_begins_while_it_is_loaded() -> None:
    """The session is rewound to nothing during the load. The turn begins at once, and the load's pages are freed when
    it ends."""
    books = books_of()
    demoted(books, "a")
    books.sessions.promote("a")
    books.sessions.rewind_session("a", 0)
    kv = books.begin("a", tokens_from(0, 5))
    books.check()
    assert kv.committed_len == 0
    assert books.end_copies() == [LOAD]
    assert [order.kind for order in books.take_orders()] == [DROP]
    books.sessions.give_back(kv, "a", tokens_from(0, 5), 0)
    books.assert_empty()


def test_a_failed_save_falls_back_to_the_token_log() -> None:
    books = books_of()
    books.run_turn("a", tokens_from(0, 15))
    books.tiers.demote(books.slot("a"))
    assert books.end_copies(failed=True) == [SAVE]
    assert books.sessions.num_sessions == 0
    assert (books.tiers.num_to_host, books.tiers.num_to_log) == (0, 1)
    assert books.take_orders() == [], "the runner has nothing to drop"
    books.assert_empty()


def test_a_failed_load_falls_back_to_the_token_log() -> None:
    books = books_of()
    demoted(books, "a")
    books.sessions.promote("a")
    assert books.end_copies(failed=True) == [LOAD]
    assert books.sessions.num_sessions == 0
    assert (books.tiers.num_from_host, books.tiers.num_to_log) == (0, 1)
    assert [order.kind for order in books.take_orders()] == [DROP]
    assert books.match("a", tokens_from(0, 20)).prefix_len == 0
    books.assert_empty()


def test_a_full_host_drops_who_is_longest_there() -> None:
    books = books_of(num_pages=32, host_pages=8)
    for number, name in enumerate("ab"):
        demoted(books, name, first=1000 * number)
    books.run_turn("c", tokens_from(5000, 15))
    books.tiers.demote(books.slot("c"))
    assert books.end_copies() == [DROP, SAVE]
    assert set(books.sessions.held_tokens()) == {"b", "c"}
    assert (books.tiers.num_to_host, books.tiers.num_to_log) == (3, 1)
    assert books.host.used_bytes == 8 * PAGE_BYTES


def test_a_session_that_the_host_has_no_room_for_goes_to_the_log_and_spares_the_others() -> None:
    books = books_of(num_pages=32, host_pages=8)
    demoted(books, "a")
    books.run_turn("big", tokens_from(1000, 40))
    books.tiers.demote(books.slot("big"))
    books.check()
    assert set(books.sessions.held_tokens()) == {"a"}, "too large for ever: nobody was dropped for it"
    assert books.end_copies() == []


def test_nobody_is_dropped_from_the_host_for_a_session_that_finds_no_room_there_anyway() -> None:
    books = books_of(num_pages=32, host_pages=8)
    for number, name in enumerate("ab"):
        demoted(books, name, first=1000 * number)
    books.sessions.expect("b", (0, 0))
    books.run_turn("c", tokens_from(5000, 31))
    books.tiers.demote(books.slot("c"))
    books.check()
    assert set(books.sessions.held_tokens()) == {"a", "b"}, (
        "b's turn waits, so c has no room, with or without a"
    )
    assert books.tiers.num_to_log == 1


def test_sessions_whose_turns_wait_are_not_dropped_from_the_host() -> None:
    books = books_of(num_pages=32, host_pages=8)
    for number, name in enumerate("ab"):
        demoted(books, name, first=1000 * number)
    books.sessions.expect("a", (0, 0))
    books.run_turn("c", tokens_from(5000, 15))
    books.tiers.demote(books.slot("c"))
    books.end_copies()
    assert set(books.sessions.held_tokens()) == {"a", "c"}
    books.sessions.expect("c", (0, 1))
    books.run_turn("d", tokens_from(6000, 15))
    books.tiers.demote(books.slot("d"))
    books.check()
    assert set(books.sessions.held_tokens()) == {"a", "c"}


def test_a_copy_in_flight_keeps_its_bytes() -> None:
    books = books_of(num_pages=32, host_pages=4)
    books.run_turn("a", tokens_from(0, 15))
    books.run_turn("b", tokens_from(1000, 15))
    books.tiers.demote(books.slot("a"))
    books.tiers.demote(books.slot("b"))
    books.check()
    assert set(books.sessions.held_tokens()) == {"a"}
    assert books.tiers.num_to_log == 1


def test_a_closed_session_on_the_host_is_dropped_at_once() -> None:
    books = books_of()
    demoted(books, "a")
    books.sessions.release_session("a")
    assert [order.kind for order in books.take_orders()] == [DROP]
    books.assert_empty()


@pytest.mark.parametrize("loading", [False, True])
def test_a_rewind_on_the_host_holds_when_the_kv_comes_back(loading: bool) -> None:
    books = books_of()
    demoted(books, "a")
    if loading:
        books.sessions.promote("a")
    books.sessions.rewind_session("a", 9)
    assert books.sessions.held_tokens() == {"a": 9}
    books.sessions.rewind_session("a", 12)
    assert books.sessions.held_tokens() == {"a": 9}, "what was cut does not come back"
    assert books.match("a", tokens_from(0, 20)).prefix_len == 9
    books.sessions.promote("a")
    assert LOAD in books.end_copies()
    match = books.match("a", tokens_from(0, 20))
    assert (match.prefix_len, match.elsewhere) == (9, False)
    kv = books.begin("a", tokens_from(0, 20))
    books.check()
    assert (kv.committed_len, kv.allocated_len, kv.num_pages) == (9, 9, 3)


def test_pages_for_a_load_come_from_sessions_that_are_needed_later() -> None:
    books = books_of(num_pages=8, host_pages=16)
    demoted(books, "a")
    books.run_turn("b", tokens_from(1000, 32))  # all 8 pages
    books.sessions.expect("b", (0, 0))
    books.sessions.expect("a", (0, 1))
    assert books.sessions.promote("a") is Room.SHORT, "b's turn comes first"
    books.sessions.expect("b", (0, 2))
    assert books.sessions.promote("a") is Room.WAIT, "b is on its way out"
    assert books.slot("b").state is SlotState.SAVING
    books.end_copies()
    assert books.sessions.promote("a") is Room.READY
    assert LOAD in books.end_copies()
    assert books.slot("a").state is SlotState.IDLE


def test_no_room_for_a_load_while_running_turns_hold_all_pages() -> None:
    books = books_of(num_pages=8, host_pages=8)
    demoted(books, "a")
    kv = books.begin(None, tokens_from(1000, 30))
    books.fill(kv, 30)
    assert books.sessions.promote("a") is Room.SHORT
    books.check()
    assert books.slot("a").state is SlotState.STORED
    assert books.take_orders() == []


def test_saving_once_is_enough_for_the_pages_it_brings() -> None:
    """A second request for the same pages waits for the copy. It does not demote one more session."""
    books = books_of(num_pages=8, host_pages=8)
    books.run_turn("a", tokens_from(0, 16))
    books.run_turn("b", tokens_from(1000, 16))
    kv = books.begin(None, tokens_from(2000, 30))
    assert books.sessions.extend(kv, 8) is Room.WAIT
    assert books.sessions.extend(kv, 8) is Room.WAIT
    assert [books.slot(name).state for name in "ab"] == [SlotState.SAVING, SlotState.IDLE]
    books.end_copies()
    assert books.sessions.extend(kv, 8) is Room.READY
    books.check()


def test_window_pages_travel_with_the_session() -> None:
    books = books_of(num_pages=64, host_pages=64, window_len=8)
    books.run_turn("a", tokens_from(0, 50))
    kv = books.slot_kv("a")
    assert kv.window is not None
    live, first = kv.window.live().tolist(), kv.window.first
    assert len(live) < kv.num_pages
    books.tiers.demote(books.slot("a"))
    (save,) = books.take_orders()
    assert save.pages is not None
    assert save.pages.window.tolist() == live
    assert books.host.used_bytes == 13 * PAGE_BYTES + len(live) * WINDOW_PAGE_BYTES
    books.tiers.copy_done(save.key)
    books.check()
    assert books.window_accounts().free == 64
    assert books.sessions.promote("a") is Room.READY
    books.end_copies()
    back = books.slot_kv("a")
    assert back.window is not None
    assert (back.window.first, len(back.window.live()), back.num_pages) == (first, len(live), 13)
    kv = books.begin("a", tokens_from(0, 60))
    assert kv.committed_len == 49
    books.fill(kv, 59, keep_len=50)
    books.sessions.finish_turn("a", kv, tokens_from(0, 60))
    books.check()
    books.sessions.release_session("a")
    books.assert_empty()


@pytest.mark.parametrize("loading", [False, True])
def test_stored_kv_that_was_cut_past_its_window_is_not_loaded(loading: bool) -> None:
    """The window pages that the turn would need are gone, so what the load brings could not be continued."""
    books = books_of(num_pages=64, host_pages=64, window_len=8)
    demoted(books, "a", 51)
    if loading:
        assert books.sessions.promote("a") is Room.READY
    match = books.match("a", joined(tokens_from(0, 20), tokens_from(1000, 20)))
    assert (match.prefix_len, match.elsewhere, match.loading) == (0, False, False)
    assert books.match("a", tokens_from(0, 60)).prefix_len == 50, (
        "a turn that goes on from the end can use it"
    )
    books.begin("a", joined(tokens_from(0, 20), tokens_from(1000, 20)))
    books.end_copies()
    assert books.host.used_bytes == 0


@pytest.mark.parametrize("loading", [False, True])
def test_stored_kv_is_dropped_by_a_rewind_past_its_window(loading: bool) -> None:
    books = books_of(num_pages=64, host_pages=64, window_len=8)
    demoted(books, "a", 51)
    if loading:
        assert books.sessions.promote("a") is Room.READY
    books.sessions.rewind_session("a", 50)
    assert books.sessions.held_tokens() == {"a": 50}
    books.sessions.rewind_session("a", 20)
    books.end_copies()
    assert books.sessions.held_tokens() == {}
    books.assert_empty()
