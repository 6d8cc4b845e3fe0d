"""PrefixCache: shared prefixes are locked, never written, and every page has one account."""

from __future__ import annotations

import pytest

from cache.pages import BooksError, PageAllocator, PageCounts
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import PageAccount, SequenceKV
from tests.unit.cache.books import PAGE_SIZES, Books, joined, no_chain, tokens_from


def counts(books: Books) -> tuple[int, int, int]:
    """The numbers of (cached, protected, in flight) pages."""
    books.check()
    accounts = books.accounts()
    return accounts.cached, accounts.protected, accounts.in_flight


def test_a_page_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PrefixCache(PageAllocator(4), 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_finished_request_leaves_its_whole_pages(page_size: int) -> None:
    books = Books.make(page_size)
    tokens = tokens_from(0, 3 * page_size + (page_size > 1))
    books.run_plain(tokens)
    assert counts(books) == (3, 0, 0)
    match = books.prefixes.match_prefix("", tokens)
    assert (match.prefix_len, match.evictable) == (3 * page_size, PageCounts(3))
    books.assert_empty()


def test_begin_locks_the_prefix_and_release_returns_the_lock() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 16)
    books.run_plain(tokens)
    kv = books.begin(None, tokens)
    assert (kv.committed_len, kv.protected_len, kv.allocated_len) == (12, 12, 12)
    assert counts(books) == (1, 3, 0)
    books.fill(kv, 18)
    assert counts(books) == (1, 3, 2)
    books.prefixes.release(kv)
    assert (kv.num_pages, kv.allocated_len, kv.committed_len, kv.protected_len) == (0, 0, 0, 0)
    assert kv.node is None
    assert counts(books) == (4, 0, 0)


def test_extend_too_far_changes_nothing() -> None:
    books = Books.make(4, num_pages=4)
    kv = books.begin(None, tokens_from(0, 30))
    assert books.prefixes.extend(kv, 9)
    before = kv.pages.tolist()
    assert not books.prefixes.extend(kv, 17)
    assert (kv.pages.tolist(), kv.allocated_len) == (before, 9)
    assert counts(books) == (0, 0, 3)


def test_sharing_a_prompt_twice_is_a_no_op() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 18)
    kv = books.begin(None, tokens)
    books.fill(kv, 18)
    for _ in range(2):
        books.sessions.cache_unfinished(kv, tokens)
        assert counts(books) == (0, 4, 1)
    assert kv.protected_len == 16


def test_only_committed_tokens_are_shared() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 16)
    kv = books.begin(None, tokens)
    assert books.prefixes.extend(kv, 16)
    kv.commit(7, None)
    books.sessions.cache_unfinished(kv, tokens)
    assert kv.protected_len == 4
    assert books.match(None, tokens).prefix_len == 4


def test_two_equal_prompts_in_one_step_keep_one_copy() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 16)
    first, second = books.begin(None, tokens), books.begin(None, tokens)
    books.fill(first, 16)
    books.fill(second, 16)
    assert counts(books) == (0, 0, 8)
    books.sessions.cache_unfinished(first, tokens)
    books.sessions.cache_unfinished(second, tokens)
    assert counts(books) == (0, 4, 0)
    assert second.pages.tolist() == first.pages.tolist()
    books.prefixes.release(first)
    assert counts(books) == (0, 4, 0), "still locked by the second"
    books.prefixes.release(second)
    books.assert_empty()


def test_a_longer_shared_prefix_keeps_the_tree_s_copy_of_the_middle() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 24)
    books.run_plain(tokens[:8])
    late = books.begin(None, tokens)  # locks 8 tokens
    books.fill(late, 24)
    books.run_plain(tokens[:16])  # meanwhile the tree gets tokens 8..16
    books.sessions.cache_unfinished(late, tokens)
    assert late.protected_len == 24
    assert counts(books) == (0, 6, 0)
    books.prefixes.release(late)
    books.assert_empty()


@pytest.mark.parametrize("target_len", range(19))
def test_shrink_keeps_lengths_locks_and_pages_together(target_len: int) -> None:
    """12 of 18 tokens are protected. The cuts go past this prefix, to its end, into it on and off page borders, and to
    0."""
    books = Books.make(4)
    tokens = tokens_from(0, 18)
    kv = books.begin(None, tokens)
    books.fill(kv, 13)
    books.sessions.cache_unfinished(kv, tokens[:13])
    books.fill(kv, 18)
    assert kv.protected_len == 12
    books.prefixes.shrink(kv, target_len)
    expected = target_len if target_len >= 12 else target_len - target_len % 4
    assert (kv.committed_len, kv.allocated_len) == (expected, expected)
    assert kv.protected_len == min(12, expected)
    assert (kv.node is None) == (expected < 4)
    pages = -(-expected // 4)
    protected = min(12, expected) // 4
    assert counts(books) == (3 - protected, protected, pages - protected)
    books.prefixes.release(kv)
    books.assert_empty()


def test_shrink_into_the_protected_prefix_then_growing_writes_fresh_pages() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 18)
    kv = books.begin(None, tokens)
    books.fill(kv, 18)
    books.sessions.cache_unfinished(kv, tokens)
    shared = set(kv.pages[:4].tolist())
    books.prefixes.shrink(kv, 10)
    books.fill(kv, 18)
    assert not shared & set(kv.private_pages.tolist())
    books.prefixes.release(kv)
    books.assert_empty()


def test_the_tree_s_pages_outlive_the_sequence_that_computed_them() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 13)
    kv = books.begin(None, tokens)
    books.fill(kv, 13)
    books.sessions.cache_unfinished(kv, tokens)
    other = books.begin(None, tokens)
    books.prefixes.release(kv)
    assert counts(books) == (0, 3, 0)
    assert other.pages.tolist() == books.prefixes._tree.path_pages(other.node).tolist()  # type: ignore[arg-type]
    books.prefixes.release(other)
    books.assert_empty()


def test_locks_taken_equal_locks_returned_after_others_split_the_node() -> None:
    books = Books.make(4, num_pages=64)
    tokens = tokens_from(0, 24)
    kv = books.begin(None, tokens)
    books.fill(kv, 24)
    books.sessions.cache_unfinished(kv, tokens)
    for cut in (4, 12, 20):
        books.run_plain(joined(tokens[:cut], tokens_from(1000 * cut, 9)))
    assert kv.pages.tolist() == books.prefixes._tree.path_pages(kv.node).tolist()  # type: ignore[arg-type]
    books.prefixes.shrink(kv, 15)
    books.check()
    assert books.accounts().protected == 3
    books.prefixes.release(kv)
    assert books.accounts().protected == 0
    books.assert_empty()


def test_evict_frees_what_is_unlocked_and_says_how_much() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 16)
    books.run_plain(tokens)
    kv = books.begin(None, tokens)  # locks 12 of 16 tokens
    assert books.prefixes.evict(100) == PageCounts(1)
    assert books.prefixes.evict(100) == PageCounts(0)
    books.prefixes.release(kv)
    books.assert_empty()


def test_without_prefix_cache_nothing_is_shared() -> None:
    books = Books.make(4, shared=False)
    tokens = tokens_from(0, 16)
    books.run_plain(tokens)
    assert books.match(None, tokens).prefix_len == 0
    kv = books.begin(None, tokens)
    books.fill(kv, 16)
    books.sessions.cache_unfinished(kv, tokens)
    assert (kv.protected_len, kv.node) == (0, None)
    books.prefixes.release(kv)
    assert books.accounts().free == 32


def test_only_a_sequence_in_flight_can_be_parked() -> None:
    books = Books.make(4)
    with pytest.raises(KeyError):
        books.prefixes.reclaim(SequenceKV(no_chain(4), PageAccount()), PageAccount())


def test_cutting_the_prefix_under_private_pages_is_refused() -> None:
    books = Books.make(4)
    tokens = tokens_from(0, 16)
    books.run_plain(tokens)
    kv = books.begin(None, tokens)
    books.fill(kv, 16)
    with pytest.raises(BooksError, match="under private pages"):
        books.prefixes._unprotect(kv, 4)
