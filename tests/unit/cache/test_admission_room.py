"""can_begin says exactly whether a turn can get its pages without a retraction."""

from __future__ import annotations

import random

import pytest

from cache.journal import Holder
from cache.pages import PageCounts
from cache.session_cache import Room
from tests.unit.cache.books import Books, joined, tokens_from


def test_can_begin_counts_free_cached_and_idle_but_not_running_pages() -> None:
    books = Books.make(4, num_pages=16)
    holder = books.begin(None, tokens_from(0, 16))
    books.fill(holder, 16)  # 4 pages in flight
    books.run_plain(tokens_from(100, 16))  # 4 cached
    books.run_turn("a", tokens_from(200, 17))  # 4 idle, 4 free
    match = books.match(None, tokens_from(300, 100))
    assert books.sessions.can_begin(match, 4 * 12)
    assert not books.sessions.can_begin(match, 4 * 12 + 1)
    assert not books.sessions.can_begin(match, 4 * 12, PageCounts(1))


def test_can_begin_does_not_count_the_matched_prefix_as_room() -> None:
    books = Books.make(4, num_pages=8)
    tokens = tokens_from(0, 16)
    books.run_plain(tokens)  # 4 cached, 4 free
    match = books.match(None, joined(tokens, tokens_from(100, 30)))
    assert match.prefix is not None
    assert match.prefix.evictable == PageCounts(4)
    assert books.sessions.can_begin(match, 32)
    assert not books.sessions.can_begin(match, 33)


def test_can_begin_does_not_demote_the_session_it_is_asked_for() -> None:
    books = Books.make(4, num_pages=8)
    books.run_turn("a", tokens_from(0, 17))  # 4 pages idle
    match = books.match("a", tokens_from(0, 40))
    assert books.sessions.can_begin(match, 32)
    assert not books.sessions.can_begin(match, 33)


def test_can_begin_counts_shared_pages_once_and_only_if_they_give_way() -> None:
    """Idle sessions share a prompt. If it counted once for each of them, all would be demoted in vain."""
    books = Books.make(4, num_pages=16)
    system = tokens_from(0, 16)
    for index in range(3):  # 4 shared pages and one private page each; 9 free
        books.run_turn(f"s{index}", joined(system, tokens_from(100 * (index + 1), 4)), share=True)
    books.sessions.flush()
    assert books.accounts().free == 16 - 4 - 3
    stranger = books.match(None, tokens_from(500, 100))
    assert books.sessions.can_begin(stranger, 4 * 16), "alone, it can have everything"
    assert not books.sessions.can_begin(stranger, 4 * 16 + 1)
    sharer = books.match(None, joined(system, tokens_from(600, 100)))
    assert books.sessions.can_begin(sharer, 4 * 16)
    assert not books.sessions.can_begin(sharer, 4 * 16 + 1)
    turn = books.begin("s0", joined(system, tokens_from(100, 8)))
    assert turn.protected_len == 16
    held = 4 + turn.num_private_pages
    assert books.sessions.can_begin(stranger, 4 * (16 - held))
    assert not books.sessions.can_begin(stranger, 4 * (16 - held) + 1)


def test_can_begin_counts_shared_window_pages_that_give_way() -> None:
    """A disk that hangs may hold pages. Then nothing runs whose end a request could wait for: a wrong no is a 429."""
    books = Books.make(4, num_pages=32, window_len=16, num_window_pages=8)
    system = tokens_from(0, 16)
    for index in range(2):  # 4 window pages of the tree and one private page each; 2 free
        books.run_turn(f"s{index}", joined(system, tokens_from(100 * (index + 1), 4)), share=True)
    assert books.window_accounts().protected == 4
    stranger = books.match(None, tokens_from(500, 100))
    assert books.sessions.can_begin(stranger, 4 * 8)
    assert not books.sessions.can_begin(stranger, 4 * 9)
    assert books.sessions.extend(books.sessions.begin(stranger, Holder()), 4 * 8) is Room.READY


@pytest.mark.parametrize("num_window_pages", [None, 14])
def test_can_begin_is_exact_under_random_traffic(num_window_pages: int | None) -> None:
    """What it promises can be had. What it denies cannot, even if everything is demoted and evicted."""
    rng = random.Random(5)
    verdicts = [0, 0]
    window_len = None if num_window_pages is None else 12
    for _ in range(300):
        books = Books.make(
            4, num_pages=24, window_len=window_len, num_window_pages=num_window_pages, step_tokens=120
        )
        for index in range(rng.randrange(5)):
            prompt = joined(
                tokens_from(0, 4 * rng.randrange(4)), tokens_from(100 * (index + 1), rng.randrange(2, 9))
            )
            books.run_turn(f"s{index}", prompt, share=rng.random() < 0.8)
            if rng.random() < 0.5:
                books.begin(f"s{index}", joined(prompt, [7, 7]))
        match = books.match(None, joined(tokens_from(0, 4 * rng.randrange(4)), tokens_from(900, 90)))
        target_len = rng.randrange(max(match.prefix_len, 1), 120)
        promised = books.sessions.can_begin(match, target_len)
        had = books.sessions.extend(books.sessions.begin(match, Holder()), target_len) is Room.READY
        books.check()
        assert promised == had
        verdicts[had] += 1
    assert min(verdicts) > 40


def test_can_begin_counts_all_that_a_session_brings_from_the_host() -> None:
    books = Books.make(4, num_pages=16, host_pages=16)
    books.run_turn("big", tokens_from(0, 41))
    books.tiers.demote(books.slot("big"))
    books.end_copies()
    books.fill(books.begin(None, tokens_from(500, 20)), 32)  # 8 pages in flight
    books.run_turn("idle", tokens_from(900, 9))
    books.sessions.rewind_session("big", 8)
    match = books.match("big", tokens_from(0, 10))
    assert match.elsewhere
    assert not books.sessions.can_begin(match, 10), (
        "10 pages are to be fetched, the idle session would go in vain"
    )
