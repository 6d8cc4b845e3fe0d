"""The disk below the host: who is written to it and when, who gives way on it, and what becomes of sessions on their
way that are wanted, closed, rewound or forked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cache.session_cache import Room
from cache.slots import SlotState
from cache.tiers import CopyKind, CopyOrder
from tests.unit.cache.books import PAGE_BYTES, WINDOW_PAGE_BYTES, Books, tokens_from

SAVE, SPILL, LOAD, DROP = CopyKind.SAVE, CopyKind.SPILL, CopyKind.LOAD, CopyKind.DROP
KV = 4 * PAGE_BYTES
"""The bytes that a session of 15 tokens takes below the device."""


def books_of(*, num_pages: int = 32, host_pages: int = 8, disk_pages: int = 16, **options: int) -> Books:
    """Makes books. By default the host has room for two sessions and keeps half of one free."""
    return Books.make(
        page_size=4, num_pages=num_pages, host_pages=host_pages, disk_pages=disk_pages, **options
    )


def saved(books: Books, *names: str) -> None:
    """Puts these sessions' KV on the host. Writes to disk that this causes are not handed out yet."""
    for name in names:
        books.run_turn(name, tokens_from(1000 * ord(name[0]), 15))
        books.tiers.demote(books.slot(name))
        (order,) = [order for order in books.take_orders() if order.kind is SAVE]
        books.tiers.copy_done(order.key)
        books.check()


def being_written(books: Books) -> CopyOrder:
    """Starts writing session a to disk, with session b on the host. Returns the order."""
    saved(books, "a", "b")
    (order,) = books.take_orders()
    assert order.kind is SPILL
    return order


def written(books: Books) -> None:
    """Puts session a on disk and session b on the host."""
    books.tiers.copy_done(being_written(books).key)
    assert [order.kind for order in books.take_orders()] == [DROP]
    assert on_disk(books, "a")
    assert not on_disk(books, "b")


def on_disk(books: Books, name: str) -> bool:
    entry = books.slot(name).entry
    assert books.slot(name).state is SlotState.STORED
    assert entry is not None
    return entry.on_disk


def resume(books: Books, name: str) -> int:
    """Begins the session's next turn, whose KV must be on the device, and takes it back. Returns how much KV there
    was."""
    kv = books.begin(name, tokens_from(1000 * ord(name[0]), 20))
    length = kv.committed_len
    books.sessions.give_back(kv, name, tokens_from(1000 * ord(name[0]), 20), length)
    books.check()
    return length


def close_all(books: Books, *names: str) -> None:
    for name in names:
        books.sessions.release_session(name)
        books.check()
    assert set(books.end_copies()) <= {DROP}
    books.assert_empty()


def test_who_is_longest_on_the_host_is_written_to_disk_before_others_need_the_room() -> None:
    books = books_of()
    saved(books, "a")
    assert books.take_orders() == [], "half of the host is still free"
    saved(books, "b")
    source = books.slot("a").entry
    assert source is not None
    (order,) = books.take_orders()
    assert (order.kind, order.source) == (SPILL, source.key)
    assert (books.host.used_bytes, books.disk.used_bytes) == (2 * KV, KV), "in both until it is written"
    assert books.slot("a").state is SlotState.STORED
    books.tiers.copy_done(order.key)
    books.check()
    assert [(order.kind, order.key) for order in books.take_orders()] == [(DROP, source.key)]
    assert (books.host.used_bytes, books.disk.used_bytes, books.disk.sessions) == (KV, KV, 1)
    assert books.sessions.held_tokens() == {"a": 14, "b": 14}
    assert (books.tiers.num_to_host, books.tiers.num_to_disk, books.tiers.num_to_log) == (2, 1, 0)
    close_all(books, "a", "b")


def test_without_a_disk_nobody_leaves_the_host_before_the_room_is_needed() -> None:
    books = books_of(disk_pages=0)
    saved(books, "a", "b")
    assert books.take_orders() == []
    assert books.sessions.held_tokens() == {"a": 14, "b": 14}


def test_from_disk_to_the_device_in_one_load() -> None:
    books = books_of()
    written(books)
    match = books.match("a", tokens_from(97000, 20))
    assert (match.prefix_len, match.elsewhere) == (14, True)
    assert books.sessions.promote("a") is Room.READY
    (load,) = books.take_orders()
    assert load.kind is LOAD
    assert books.match("a", tokens_from(97000, 20)).loading
    assert books.disk.used_bytes == KV, "until it is read"
    books.tiers.copy_done(load.key)
    books.check()
    assert [(order.kind, order.key) for order in books.take_orders()] == [(DROP, load.key)]
    assert resume(books, "a") == 14
    assert books.disk.used_bytes == 0
    assert (books.tiers.num_from_host, books.tiers.num_from_disk) == (0, 1)
    close_all(books, "a", "b")


@pytest.mark.parametrize("load_first", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_a_turn_takes_back_from_the_host_what_is_being_written(failed: bool, load_first: bool) -> None:
    books = books_of()
    write = being_written(books)
    assert books.sessions.promote("a") is Room.READY
    (load,) = books.take_orders()
    assert (load.kind, load.key) == (LOAD, write.source)
    if load_first:
        books.tiers.copy_done(load.key)
        books.check()
        assert resume(books, "a") == 14
        assert (books.host.used_bytes, books.disk.used_bytes) == (2 * KV, KV), "the write still reads it"
        assert books.take_orders() == []
    books.tiers.copy_done(write.key, failed=failed)
    books.check()
    assert books.disk.used_bytes == 0
    assert (books.tiers.num_disk_failures, books.tiers.num_to_disk) == (failed, 0)
    if not load_first:
        assert books.slot("a").state is SlotState.LOADING
        books.tiers.copy_done(load.key)
        books.check()
        assert resume(books, "a") == 14
    dropped = {order.key for order in books.take_orders() if order.kind is DROP}
    assert dropped == ({write.source} if failed else {write.source, write.key})
    assert (books.tiers.num_from_host, books.tiers.num_to_log) == (1, 0), "a failed write cost nothing"
    close_all(books, "a", "b")


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("again", ["", "on the device", "on the host"])
def test_a_session_closed_while_it_is_written_keeps_its_bytes_till_the_end(again: str, failed: bool) -> None:
    books = books_of()
    write = being_written(books)
    books.sessions.release_session("a")
    books.check()
    assert books.take_orders() == [], "what is read must not be dropped"
    assert (books.host.used_bytes, books.disk.used_bytes) == (2 * KV, KV)
    if again:
        books.sessions.release_session("b")  # nobody has to give way on the host then
        assert [order.kind for order in books.take_orders()] == [DROP]
        books.run_turn("a", tokens_from(500, 9))  # a new session of the same name
    if again == "on the host":
        books.tiers.demote(books.slot("a"))
        assert books.end_copies() == [SAVE]
    books.tiers.copy_done(write.key, failed=failed)
    books.check()
    dropped = [order.key for order in books.take_orders() if order.kind is DROP]
    assert dropped == [write.source] + [write.key] * (not failed)
    own = {"": KV, "on the device": 0, "on the host": 2 * PAGE_BYTES}[again]
    assert (books.host.used_bytes, books.disk.used_bytes) == (own, 0)
    assert books.sessions.held_tokens() == ({"a": 8} if again else {"b": 14})
    assert books.tiers.num_to_log == 0
    close_all(books, "a", "b")


def test_a_session_closed_and_forgotten_on_disk_is_dropped_at_once() -> None:
    books = books_of()
    written(books)
    books.sessions.release_session("a")
    assert [order.kind for order in books.take_orders()] == [DROP]
    close_all(books, "b")


@pytest.mark.parametrize("failed", [False, True])
def test_a_session_closed_while_it_is_read_keeps_its_pages_till_the_copy_ends(failed: bool) -> None:
    books = books_of()
    written(books)
    books.sessions.promote("a")
    (load,) = books.take_orders()
    books.sessions.release_session("a")
    books.check()
    assert (books.accounts().session, books.disk.used_bytes) == (4, KV)
    books.tiers.copy_done(load.key, failed=failed)
    assert [order.key for order in books.take_orders()] == [load.key]
    assert books.tiers.num_disk_failures == failed
    close_all(books, "b")


def test_a_failed_write_leaves_the_copy_of_the_host() -> None:
    books = books_of()
    write = being_written(books)
    books.tiers.copy_done(write.key, failed=True)
    books.check()
    assert books.take_orders() == [], "the host's copy stays, and nothing was left on disk"
    assert not on_disk(books, "a")
    assert (books.host.used_bytes, books.disk.used_bytes) == (2 * KV, 0)
    assert (books.tiers.num_to_disk, books.tiers.num_to_log, books.tiers.num_disk_failures) == (0, 0, 1)
    assert books.sessions.promote("a") is Room.READY
    assert books.end_copies() == [LOAD]
    assert resume(books, "a") == 14
    close_all(books, "a", "b")


def write_after(books: Books, name: str) -> CopyOrder | None:
    """Puts one more session on the full host. Returns the order to write a session to disk that was given by then, if
    any."""
    books.run_turn(name, tokens_from(1000 * ord(name[0]), 15))
    books.tiers.demote(books.slot(name))
    orders = books.take_orders()
    (save,) = [order for order in orders if order.kind is SAVE]
    books.tiers.copy_done(save.key)
    orders += books.take_orders()
    return next((order for order in orders if order.kind is SPILL), None)


def test_a_failing_disk_is_left_alone_for_longer_each_time() -> None:
    books = books_of()
    write: CopyOrder | None = being_written(books)
    names = iter("cdefghijklmnopqrstuvwxyz")
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert write is not None
        books.tiers.copy_done(write.key, failed=True)
        books.check()
        books.clock.advance(pause_s - 0.25)
        assert write_after(books, next(names)) is None
        books.clock.advance(0.25)
        write = write_after(books, next(names))
    assert write is not None
    assert (books.tiers.num_disk_failures, books.tiers.num_to_disk) == (8, 0)
    books.tiers.copy_done(write.key)
    write = write_after(books, next(names))
    assert write is not None, "a write has succeeded"
    books.tiers.copy_done(write.key, failed=True)
    books.clock.advance(1)
    assert write_after(books, next(names)) is not None, "and the pauses begin anew"


def test_a_write_that_failed_is_tried_again_once_the_pause_is_over_though_no_copy_ends() -> None:
    books = books_of()
    write = being_written(books)
    books.tiers.copy_done(write.key, failed=True)
    assert books.take_orders() == []
    books.clock.advance(1)
    (again,) = books.take_orders()
    assert (again.kind, again.source) == (SPILL, write.source)
    books.tiers.copy_done(again.key)
    assert on_disk(books, "a")


def test_who_is_longest_on_a_disk_makes_room_if_there_is_less_space_than_its_budget() -> None:
    """The disk has space for two sessions, its budget for four."""
    books = books_of()
    names = iter("abcdefghijkl")
    saved(books, next(names))
    for _ in range(8):
        write = write_after(books, next(names))
        if write is None:
            books.clock.advance(1)
            (write,) = books.take_orders()
        if books.disk.sessions <= 2:
            books.tiers.copy_done(write.key)
            continue
        (oldest, *_) = (entry.session_id for entry in books.tiers._disk.settled())
        books.tiers.copy_done(write.key, failed=True, disk_full=True)
        books.check()
        assert oldest not in books.sessions.held_tokens()
        assert books.disk.sessions == 1
    assert books.tiers.num_disk_failures >= 3
    assert books.tiers.num_to_disk >= 4


def test_sessions_whose_turns_wait_stay_on_a_disk_without_space() -> None:
    books = books_of()
    written(books)
    books.sessions.expect("a", (0, 0))
    write = write_after(books, "c")
    assert write is not None
    books.tiers.copy_done(write.key, failed=True, disk_full=True)
    books.check()
    assert on_disk(books, "a")


def test_a_session_that_the_disk_could_never_hold_keeps_no_other_off_it() -> None:
    books = books_of(num_pages=64, host_pages=16, disk_pages=8)
    books.run_turn("big", tokens_from(0, 40))
    books.tiers.demote(books.slot("big"))
    assert books.end_copies() == [SAVE]
    saved(books, "a")
    assert [order.kind for order in books.take_orders()] == [SPILL]
    assert books.tiers._write is not None
    assert books.tiers._write[0].session_id == "a"
    assert not on_disk(books, "big")


def test_nobody_is_written_to_a_disk_that_has_just_failed_to_read() -> None:
    books = books_of()
    written(books)
    books.sessions.promote("a")
    assert books.end_copies(failed=True) == [LOAD]
    assert write_after(books, "c") is None
    assert set(books.sessions.held_tokens()) == {"b", "c"}
    books.clock.advance(1)
    assert write_after(books, "d") is not None


def test_a_failed_read_falls_back_to_the_token_log() -> None:
    books = books_of()
    written(books)
    books.sessions.promote("a")
    assert books.end_copies(failed=True) == [LOAD]
    assert [order.kind for order in books.take_orders()] == [DROP], "its file is of no use any more"
    assert books.match("a", tokens_from(97000, 20)).prefix_len == 0
    assert (books.tiers.num_to_log, books.tiers.num_disk_failures) == (1, 1)
    close_all(books, "b")


def test_a_copy_of_the_host_that_fails_is_no_fault_of_the_disk() -> None:
    books = books_of()
    saved(books, "a")
    books.sessions.promote("a")
    assert books.end_copies(failed=True) == [LOAD]
    assert (books.tiers.num_to_log, books.tiers.num_disk_failures) == (1, 0)


@pytest.mark.parametrize("during", ["write", "read"])
def test_a_rewind_holds_all_the_way_to_disk_and_back(during: str) -> None:
    books = books_of()
    write = being_written(books)
    if during == "write":
        books.sessions.rewind_session("a", 9)
    books.tiers.copy_done(write.key)
    books.sessions.promote("a")
    if during == "read":
        books.sessions.rewind_session("a", 9)
    assert books.sessions.held_tokens() == {"a": 9, "b": 14}
    books.end_copies()
    assert resume(books, "a") == 9
    close_all(books, "a", "b")


@pytest.mark.parametrize("state", [being_written, written])
def test_a_parent_on_its_way_to_disk_gives_its_fork_nothing(state: Callable[[Books], object]) -> None:
    books = books_of()
    state(books)
    assert books.fork("a", "c", tokens_from(97000, 15)) == 0
    books.end_copies()
    assert books.sessions.held_tokens()["a"] == 14


def test_a_turn_that_needs_none_of_it_begins_while_it_is_written() -> None:
    books = books_of()
    write = being_written(books)
    books.sessions.rewind_session("a", 0)
    kv = books.begin("a", tokens_from(97000, 5))
    assert kv.committed_len == 0
    books.check()
    books.tiers.copy_done(write.key)
    books.sessions.give_back(kv, "a", tokens_from(97000, 5), 0)
    books.end_copies()
    close_all(books, "b")


def test_a_full_disk_drops_who_is_longest_there() -> None:
    books = books_of(disk_pages=8)
    for name in "abcde":
        saved(books, name)
        books.end_copies()
        books.end_copies()
    assert set(books.sessions.held_tokens()) == {"c", "d", "e"}
    assert [on_disk(books, name) for name in "cde"] == [True, True, False]
    assert (books.tiers.num_to_disk, books.tiers.num_to_log) == (4, 2)
    assert books.disk.used_bytes == 2 * KV


def test_what_the_disk_has_no_room_for_stays_on_the_host_till_the_room_is_needed() -> None:
    books = books_of(disk_pages=3)
    saved(books, "a", "b")
    assert books.take_orders() == []
    saved(books, "c")
    assert set(books.sessions.held_tokens()) == {"b", "c"}
    assert books.tiers.num_to_log == 1


def test_sessions_whose_turns_wait_are_neither_written_nor_dropped_from_disk() -> None:
    books = books_of(disk_pages=4)
    written(books)
    books.sessions.expect("a", (0, 0))
    books.sessions.expect("b", (0, 1))
    saved(books, "c")
    assert books.take_orders() == [], "c would have to go before b, but a has all of the disk"
    books.sessions.unexpect("a")
    saved(books, "d")
    assert [order.kind for order in books.take_orders()] == [DROP, SPILL], (
        "c gave way to d on the host, a on the disk"
    )
    assert set(books.sessions.held_tokens()) == {"b", "d"}


def test_nobody_waits_for_a_write() -> None:
    """A write to disk frees no pages on the device, so missing pages must come from elsewhere."""
    books = books_of(num_pages=8)
    write = being_written(books)
    kv = books.begin(None, tokens_from(1, 40))
    assert books.sessions.extend(kv, 32) is Room.READY
    assert books.sessions.extend(kv, 33) is Room.SHORT
    assert not books.sessions.awaits_copies
    books.tiers.copy_done(write.key)
    assert books.tiers.num_to_disk == 1


def test_a_burst_that_the_spare_room_cannot_take_is_dropped_not_delayed() -> None:
    books = books_of()
    write = being_written(books)
    saved(books, "c")
    assert set(books.sessions.held_tokens()) == {"a", "c"}, "b went for c; a is being written, and stays"
    assert books.tiers.num_to_log == 1
    books.tiers.copy_done(write.key)
    books.check()


def test_window_pages_go_to_disk_too() -> None:
    books = books_of(num_pages=64, host_pages=16, disk_pages=64, window_len=8)
    books.run_turn("a", tokens_from(0, 50))
    table = books.slot_kv("a").window
    assert table is not None
    num_live, first = len(table.live()), table.first
    books.tiers.demote(books.slot("a"))
    assert books.end_copies() == [SAVE]
    assert books.end_copies() == [SPILL]
    assert books.disk.used_bytes == 13 * PAGE_BYTES + num_live * WINDOW_PAGE_BYTES
    assert books.sessions.promote("a") is Room.READY
    books.end_copies()
    back = books.slot_kv("a").window
    assert back is not None
    assert (back.first, len(back.live())) == (first, num_live)
    books.sessions.release_session("a")
    books.assert_empty()


def test_an_audit_names_what_is_stored_for_nobody() -> None:
    books = books_of()
    written(books)
    books.slot("a").entry = None
    assert f"{KV} bytes of session a are stored for nobody" in books.sessions.books.audit().mismatches


def test_where_each_sessions_kv_is_can_be_asked() -> None:
    """Watchers ask about a few sessions. A session without KV is not in the answer."""
    books = books_of()
    written(books)
    books.run_turn("c", tokens_from(0, 9))
    lent = tokens_from(5000, 9)
    books.run_turn("d", lent)
    kv = books.begin("d", tokens_from(5000, 12))
    places = books.sessions.places(["a", "b", "c", "d", "unknown"])
    said = {name: (place.tier, place.tokens) for name, place in places.items()}
    assert said == {"a": ("disk", 14), "b": ("host", 14), "c": ("device", 8), "d": ("device", None)}
    books.sessions.give_back(kv, "d", tokens_from(5000, 12), 8)
