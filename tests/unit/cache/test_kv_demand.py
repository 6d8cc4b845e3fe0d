"""Demand is the KV that turns hold or lack. KV of idle sessions is demand only if there was room for it nowhere and a
turn missed it."""

from __future__ import annotations

import pytest

from cache.lost_kv import MISSED_FOR_S, MOST_REMEMBERED, LostKV
from cache.slots import SlotState
from tests.unit.cache.books import Books, tokens_from
from tests.unit.controllers.manual_clock import ManualClock


def pages(books: Books, *waiting: tuple[str | None, int]) -> float:
    """The demand in pages of the pool."""
    return books.sessions.demand.utilization(waiting) * books.allocator.num_pages


def test_a_running_turn_is_demand_and_an_idle_session_is_none() -> None:
    books = Books.make(4, 32)
    kv = books.begin("a", tokens_from(0, 15))
    books.fill(kv, 14)
    assert pages(books) == 4
    books.sessions.finish_turn("a", kv, tokens_from(0, 15))
    assert books.accounts().session == 4
    assert pages(books) == 0
    kv = books.begin("a", tokens_from(0, 20))
    assert pages(books) == 4, "lent to its next turn"
    books.prefixes.release(kv)


def test_an_idle_session_is_no_demand_wherever_its_kv_is() -> None:
    books = Books.make(4, 32, host_pages=16)
    books.run_turn("a", tokens_from(0, 15))
    books.tiers.demote(books.slot("a"))
    assert pages(books) == 0
    books.end_copies()
    assert books.slot("a").state is SlotState.STORED
    assert pages(books) == 0


def test_what_running_turns_share_counts_once_and_what_idle_ones_share_not() -> None:
    books = Books.make(4, 32)
    books.run_turn("idle", tokens_from(0, 13), share=True)
    assert books.accounts().protected == 3
    assert pages(books) == 0
    running = [books.begin(name, tokens_from(0, 13)) for name in ("a", "b")]
    for kv in running:
        books.fill(kv, 13)
    assert pages(books) == 3 + 1 + 1
    for kv in running:
        books.prefixes.release(kv)
    assert pages(books) == 0


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 400])
def test_a_turn_that_waits_lacks_all_its_pages(num_tokens: int) -> None:
    books = Books.make(4, 32)
    assert pages(books, ("a", num_tokens), (None, 3)) == -(-num_tokens // 4) + 1


def test_a_turn_that_waits_lacks_nothing_of_what_its_session_shares() -> None:
    books = Books.make(4, 32)
    books.run_turn("a", tokens_from(0, 13), share=True)
    assert pages(books, ("a", 20)) == 5 - 3
    assert pages(books, ("b", 20)) == 5
    assert pages(books, ("a", 4)) == 0, "rewound into what it shares"


def test_kv_that_was_dropped_is_demand_once_it_is_missed_and_for_a_minute() -> None:
    books = Books.make(4, 32)
    books.run_turn("a", tokens_from(0, 15))
    books.tiers.demote(books.slot("a"))
    assert books.tiers.num_to_log == 1
    assert pages(books) == 0, "perhaps nobody comes back for it"
    books.run_turn("a", tokens_from(0, 15))
    assert pages(books) == 4
    books.clock.advance(MISSED_FOR_S / 2)
    books.tiers.demote(books.slot("a"))
    books.run_turn("a", tokens_from(0, 15))
    assert pages(books) == 4, "a session counts once"
    books.clock.advance(MISSED_FOR_S - 1)
    assert pages(books) == 4
    books.clock.advance(1)
    assert pages(books) == 0


def test_kv_that_was_dropped_from_the_host_is_missed_too() -> None:
    books = Books.make(4, 32, host_pages=4)
    for number, name in enumerate("ab"):
        books.run_turn(name, tokens_from(100 * number, 15))
        books.tiers.demote(books.slot(name))
        books.end_copies()
    assert books.tiers.num_to_log == 1
    books.run_turn("a", tokens_from(0, 15))
    assert pages(books) == 4


def test_a_session_that_left_misses_nothing() -> None:
    """If the KV of a session that comes back counted as missed, moves would look like a shortage."""
    books = Books.make(4, 32)
    books.run_turn("a", tokens_from(0, 15))
    books.tiers.demote(books.slot("a"))
    books.sessions.release_session("a")
    books.run_turn("a", tokens_from(0, 15))
    assert pages(books) == 0


def test_the_pool_with_less_room_counts() -> None:
    """The window pool of eight pages runs short first."""
    books = Books.make(4, 64, window_len=8, num_window_pages=8, step_tokens=4)
    kv = books.begin("a", tokens_from(0, 9))
    books.fill(kv, 8)
    assert books.sessions.demand.utilization(()) == 2 / 8
    most = books.window.pages_for_span(4)
    assert books.sessions.demand.utilization([("b", 200)]) == max((2 + 50) / 64, (2 + most) / 8)
    books.sessions.cache_unfinished(kv, tokens_from(0, 9))
    assert books.window_accounts().protected == 2
    assert books.sessions.demand.utilization(()) == 2 / 8, "shared pages are held all the same"
    books.prefixes.release(kv)
    assert books.sessions.demand.utilization(()) == 0


def test_lost_kv_remembers_a_bounded_number() -> None:
    lost = LostKV(ManualClock())
    for number in range(MOST_REMEMBERED + 1):
        lost.drop(str(number), 1)
    lost.begin("0")
    assert lost.missed() == []
    lost.begin("1")
    assert lost.missed() == [1]
