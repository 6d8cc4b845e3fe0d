"""WindowPool: pages leave with the window, stay for a rollback, and the prefix tree shares each of them once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.journal import Holder
from cache.pages import BooksError, PageAllocator, PageCounts
from cache.session_cache import EVICTION_SHARE, Room
from cache.window import WindowPool
from cache.window_table import GONE
from tests.unit.cache.books import Books, joined, tokens_from


def windowed(page_size: int = 4, window_len: int = 8, **options: int) -> Books:
    options.setdefault("num_pages", 64)
    return Books.make(page_size, window_len=window_len, **options)  # type: ignore[arg-type]


def seen(length: int, window_len: int) -> set[int]:
    """The tokens before `length` that the query at position `length` sees."""
    return set(range(max(0, length - window_len + 1), length))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window_len", [1, 3, 8, 33])
def test_a_slide_frees_what_no_later_query_sees_and_nothing_else(page_size: int, window_len: int) -> None:
    books = windowed(page_size, window_len, num_pages=256)
    kv = books.begin(None, tokens_from(0, 200))
    assert kv.window is not None
    for length in range(1, 200):
        books.fill(kv, length, keep_len=0)
        live = {index for index, page in enumerate(kv.window.pages.tolist()) if page != GONE}
        # The last committed token may be computed again, so what it sees stays as well.
        needed = {token // page_size for token in seen(length, window_len) | seen(length - 1, window_len)}
        assert needed <= live
        assert len(live) <= books.window.pages_for_span(1)
        assert books.window_accounts().in_flight == len(live)
        assert books.window.resumable(kv, length)
        assert books.window.resumable(kv, length - 1)
    books.prefixes.release(kv)
    books.assert_empty()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("step", [1, 7, 40])
def test_what_a_rollback_needs_stays_behind_a_gap(page_size: int, step: int) -> None:
    books = windowed(page_size, 8, num_pages=256)
    kv = books.begin("a", tokens_from(0, 200))
    books.fill(kv, 33, keep_len=0)
    books.sessions.finish_turn("a", kv, tokens_from(0, 33))
    before = kv.window.live().tolist()  # type: ignore[union-attr]
    kv = books.begin("a", tokens_from(0, 200))
    for length in range(33 + step, 160, step):
        books.fill(kv, length, keep_len=33)
        assert books.window.resumable(kv, 33)
        assert books.window.resumable(kv, length)
        assert books.window_accounts().in_flight <= 2 * books.window.pages_for_span(step)
    assert books.window_accounts().in_flight < kv.num_pages, "there is a gap"
    books.sessions.give_back(kv, "a", tokens_from(0, 200), 33)
    books.check()
    assert books.sessions.held_tokens() == {"a": 33}
    assert kv.window.live().tolist() == before  # type: ignore[union-attr]
    kv = books.begin("a", tokens_from(0, 200))
    books.fill(kv, 120, keep_len=33)
    books.sessions.finish_turn("a", kv, tokens_from(0, 120))
    books.check()
    assert books.window_accounts().session <= books.window.pages_for_span(1)
    books.sessions.release_session("a")
    books.assert_empty()


def test_a_cut_below_the_window_ends_at_nothing_and_can_grow_again() -> None:
    books = windowed()
    kv = books.begin(None, tokens_from(0, 60))
    books.fill(kv, 50, keep_len=0)
    books.prefixes.shrink(kv, 20)  # the window that 20 tokens need has left
    books.check()
    assert (kv.committed_len, kv.num_pages, kv.window.num_pages) == (0, 0, 0)  # type: ignore[union-attr]
    books.fill(kv, 50, keep_len=0)
    books.prefixes.release(kv)
    books.assert_empty()


@pytest.mark.parametrize("length", range(40, 52))
def test_a_cut_within_the_window_keeps_its_pages(length: int) -> None:
    books = windowed(4, 8)
    kv = books.begin(None, tokens_from(0, 60))
    books.fill(kv, 50, keep_len=0)
    resumable = books.prefixes.resumable_len(kv, min(length, 50))
    assert resumable in (0, min(length, 50))
    assert bool(resumable) == (length >= 47), "tokens 42 to 49 and the one before may be seen: page 10 on"
    books.prefixes.shrink(kv, length)
    books.check()
    assert kv.committed_len == resumable


@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    window_len=st.integers(1, 40),
    gone=st.lists(st.booleans(), max_size=30),
)
def test_longest_resumable_is_what_trying_every_length_finds(
    page_size: int, window_len: int, gone: list[bool]
) -> None:
    pool = WindowPool(PageAllocator(64), page_size, window_len)
    entries = np.array([GONE if is_gone else page for page, is_gone in enumerate(gone)], dtype=np.int32)
    best = 0
    for num_pages in range(len(gone) + 1):
        needed = {token // page_size for token in seen(num_pages * page_size, window_len)}
        if all(entries[index] != GONE for index in needed):
            best = num_pages
    assert pool.longest_resumable(entries) == best


def test_a_pool_without_room_changes_nothing() -> None:
    books = windowed(4, 8, num_window_pages=4)
    kv = books.begin(None, tokens_from(0, 60))
    assert books.prefixes.extend(kv, 13)
    before = (kv.pages.tolist(), kv.window.pages.tolist(), kv.allocated_len)  # type: ignore[union-attr]
    assert not books.prefixes.extend(kv, 17)
    books.check()
    assert (kv.pages.tolist(), kv.window.pages.tolist(), kv.allocated_len) == before  # type: ignore[union-attr]
    assert books.accounts().free == 60


def test_the_tree_takes_over_window_pages_and_others_begin_on_them() -> None:
    books = windowed(4, 8)
    tokens = tokens_from(0, 40)
    books.run_plain(tokens)
    accounts = books.window_accounts()
    assert (accounts.cached, accounts.protected, accounts.in_flight) == (10, 0, 0)
    first, second = books.begin(None, tokens), books.begin(None, tokens)
    assert first.window.live().tolist() == second.window.live().tolist()  # type: ignore[union-attr]
    # 36 tokens match; a query at 36 sees tokens 29 and on, which are in pages 7 and 8.
    assert len(first.window.live()) == 2  # type: ignore[union-attr]
    accounts = books.window_accounts()
    assert (accounts.cached, accounts.protected) == (8, 2)
    books.prefixes.release(first)
    assert books.window_accounts().protected == 2, "held by the second"
    books.prefixes.release(second)
    assert books.window_accounts().protected == 0
    books.assert_empty()


def test_a_duplicate_is_given_up_for_the_tree_s_page() -> None:
    books = windowed(4, 8)
    tokens = tokens_from(0, 16)
    first, second = books.begin(None, tokens), books.begin(None, tokens)
    books.fill(first, 16)
    books.fill(second, 16)
    assert books.window_accounts().in_flight == 8
    books.sessions.cache_unfinished(first, tokens)
    books.sessions.cache_unfinished(second, tokens)
    books.check()
    accounts = books.window_accounts()
    assert (accounts.protected, accounts.in_flight) == (4, 0)
    assert first.window.pages.tolist() == second.window.pages.tolist()  # type: ignore[union-attr]
    books.prefixes.release(first)
    books.prefixes.release(second)
    books.assert_empty()


def test_what_the_tree_lacks_is_donated_where_the_tree_has_the_prefix() -> None:
    """The tree has lost its window pages. Whoever computes the prompt again gives it new ones."""
    books = windowed(4, 8)
    tokens = tokens_from(0, 24)
    books.run_plain(tokens)
    books.sessions._inner.evict_window(100)
    books.check()
    assert books.window_accounts().cached == 0
    assert books.match(None, joined(tokens, [1])).prefix_len == 0, "the prefix has lost its window"
    kv = books.begin(None, joined(tokens, [1]))
    books.fill(kv, 24)
    books.sessions.finish(kv, tokens)
    books.check()
    assert (books.window_accounts().cached, books.accounts().cached) == (6, 6)
    assert books.match(None, joined(tokens, [1])).prefix_len == 24
    books.assert_empty()


def test_a_match_stops_where_a_sequence_can_start() -> None:
    books = windowed(4, 8)
    kv = books.begin(None, tokens_from(0, 60))
    for length in (20, 40):
        books.fill(kv, length, keep_len=0)
    books.sessions.finish(kv, tokens_from(0, 40))  # pages 0..9, window pages from 8 on
    books.check()
    assert books.match(None, tokens_from(0, 60)).prefix_len == 40
    for length in (39, 36, 20):
        assert books.match(None, tokens_from(0, length)).prefix_len == 0, "what it would see is gone"
    books.assert_empty()


@pytest.mark.parametrize("length", range(40, 44))
def test_others_begin_on_all_whole_pages_that_a_sequence_leaves(length: int) -> None:
    """What the first token behind these pages sees stays, though the sequence itself sees less."""
    books = windowed(4, 7)
    kv = books.begin(None, tokens_from(0, 60))
    for filled in range(1, length + 1):
        books.fill(kv, filled, keep_len=0)
    books.sessions.finish(kv, tokens_from(0, length))
    assert books.match(None, tokens_from(0, 60)).prefix_len == 40
    books.assert_empty()


def test_eviction_takes_the_oldest_unheld_window_pages_only() -> None:
    books = windowed(4, 8, num_window_pages=32)
    for first in (0, 1000, 2000):
        books.run_plain(tokens_from(first, 16))
    books.begin(None, tokens_from(0, 17))  # uses the oldest again, holds what it sees
    assert (books.window_accounts().cached, books.window_accounts().protected) == (10, 2)
    assert books.prefixes.evict_window(1) == 4, "a node's as a whole"
    books.check()
    assert books.match(None, tokens_from(1000, 20)).prefix_len == 0
    assert books.match(None, tokens_from(2000, 20)).prefix_len == 16
    assert books.prefixes.evict_window(100) == 4 + 2
    books.check()
    accounts = books.window_accounts()
    assert (accounts.cached, accounts.protected) == (0, 2)
    assert books.accounts().cached + books.accounts().protected == 12, "the other pool's pages stay"


def test_evicting_a_prefix_frees_its_window_pages_too() -> None:
    books = windowed(4, 8)
    books.run_plain(tokens_from(0, 16))
    assert books.prefixes.evict(100) == PageCounts(4, 4)
    books.check()
    assert books.window_accounts().free == books.window_accounts().total


def test_evicted_pages_are_counted_by_pool_though_one_of_them_has_none_to_evict() -> None:
    books = windowed(num_pages=16, num_window_pages=8)
    books.run_plain(tokens_from(0, 16))  # 4 pages of each pool
    books.prefixes.evict_window(8)
    holder = books.begin(None, tokens_from(1000, 4))
    books.fill(holder, 32)  # 8 pages of each pool
    assert books.sessions.extend(holder, 52) is Room.SHORT, "no window page is left"
    assert books.sessions.evicted == PageCounts(4, 0)
    books.prefixes.release(holder)
    books.run_plain(tokens_from(2000, 32))
    books.fill(books.begin(None, tokens_from(3000, 4)), 32)
    assert books.sessions.evicted == PageCounts(4, 8)


def test_a_full_window_pool_makes_room_by_eviction_then_demotion() -> None:
    books = windowed(4, 8, num_window_pages=12)
    books.run_plain(tokens_from(0, 16))
    books.run_turn("a", tokens_from(1000, 12))
    kv = books.begin(None, tokens_from(2000, 60))
    books.fill(kv, 32, keep_len=0)
    assert books.sessions.held_tokens() == {"a": 11}
    assert books.window_accounts().cached == 0
    books.fill(kv, 64, keep_len=0)
    assert books.sessions.held_tokens() == {}
    assert books.tiers.num_to_log == 1


def test_giving_up_more_than_was_held_is_refused() -> None:
    books = windowed(4, 8)
    books.run_plain(tokens_from(0, 16))
    kv = books.begin(None, tokens_from(0, 16))
    pages = kv.window.live().copy()  # type: ignore[union-attr]
    with pytest.raises(BooksError, match="evicted while held"):
        books.window.disown(pages)
    books.window._unhold(pages)
    with pytest.raises(BooksError, match="more often than held"):
        books.window._unhold(pages)


def test_wrong_holds_are_named_by_a_strict_check() -> None:
    books = windowed(4, 8)
    books.run_plain(tokens_from(0, 16))
    kv = books.begin(None, tokens_from(0, 16))
    page = int(kv.window.live()[0])  # type: ignore[union-attr]
    books.window._hold(np.array([page], dtype=np.int32))
    with pytest.raises(BooksError, match=f"page {page} is held by 1, not 2"):
        books.check()


def test_the_session_s_window_moves_with_its_kv() -> None:
    books = windowed(4, 8)
    books.run_turn("a", tokens_from(0, 30), share=True)
    idle = books.window_accounts()
    assert (idle.in_flight, idle.session > 0) == (0, True)
    kv = books.begin("a", tokens_from(0, 40))
    busy = books.window_accounts()
    assert (busy.session, busy.in_flight) == (0, idle.session)
    assert kv.holder == Holder("a", "r")
    books.fill(kv, 39, keep_len=29)
    books.sessions.finish_turn("a", kv, tokens_from(0, 40))
    books.check()
    books.sessions.release_session("a")
    books.assert_empty()


def test_one_eviction_of_window_pages_serves_several_requests() -> None:
    books = Books.make(1, num_pages=2048, window_len=8, num_window_pages=1024)
    for number in range(40):
        books.run_plain(tokens_from(1000 * number, 8))
    books.fill(books.begin(None, tokens_from(100_000, 800)), books.window.num_free)
    kv = books.begin(None, tokens_from(200_000, 8))
    books.fill(kv, 1)
    assert books.window.num_free == 1024 // EVICTION_SHARE - 1, "of prefixes of 8 pages each"
