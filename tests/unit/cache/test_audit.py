"""The audit finds leaks, double counting and pages without an account, and names them."""

from __future__ import annotations

import numpy as np
import pytest

from cache.audit import PageAccounts, check_balance, check_pages
from cache.pages import BooksError, PageArray
from tests.unit.cache.books import Books, tokens_from


def pages_of(*numbers: int) -> PageArray:
    return np.asarray(numbers, dtype=np.int32)


def test_balanced_books_pass() -> None:
    accounts = PageAccounts(total=10, free=4, cached=3, protected=1, session=1, in_flight=1)
    assert accounts.leaked == 0
    check_balance(accounts)


@pytest.mark.parametrize("free", [3, 5])
def test_a_leak_and_a_double_count_are_both_refused(free: int) -> None:
    accounts = PageAccounts(total=10, free=free, cached=3, protected=1, session=1, in_flight=1)
    with pytest.raises(BooksError, match=f"do not balance, {4 - free} pages leaked"):
        check_balance(accounts)


def test_the_walk_names_a_page_with_two_accounts() -> None:
    claims = [("free", pages_of(0, 1)), ("session a", pages_of(2, 1))]
    with pytest.raises(BooksError, match="page 1 belongs to free and to session a"):
        check_pages(3, claims)


def test_the_walk_names_pages_without_account() -> None:
    with pytest.raises(BooksError, match=r"pages \[1, 3\] have no account \(2 in all\)"):
        check_pages(4, [("free", pages_of(0, 2))])


def test_a_swap_that_counts_cannot_see_is_found_by_the_walk() -> None:
    books = Books.make(page_size=4)
    kv = books.run_turn("a", tokens_from(0, 10))
    kv.replace(0, books.allocator.free_pages()[:1])
    books.sessions.check()  # the counts still balance
    with pytest.raises(BooksError, match="belongs to free and to session a"):
        books.sessions.check(deep=True)


def test_pages_lost_from_a_sequence_are_a_leak() -> None:
    books = Books.make(page_size=4)
    kv = books.run_turn("a", tokens_from(0, 10))
    kv.free_aligned(4)
    with pytest.raises(BooksError, match="2 pages leaked"):
        books.sessions.check()


def test_the_busy_check_counts_lent_pages_once() -> None:
    books = Books.make(page_size=4)
    books.run_turn("a", tokens_from(0, 10))
    idle = books.sessions.accounts()
    assert (idle.session, idle.in_flight) == (3, 0)
    books.begin("a", tokens_from(0, 12))
    books.check()
    busy = books.sessions.accounts()
    assert (busy.session, busy.in_flight, busy.free) == (0, 3, idle.free)
