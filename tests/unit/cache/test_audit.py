"""The audit finds and names leaks, double counting and pages without an account."""

from __future__ import annotations

import numpy as np
import pytest

from cache.audit import Claim, PageAccounts, audit_pool
from cache.journal import Holder, PageJournal
from cache.pages import BooksError, PageArray
from tests.unit.cache.books import Books, tokens_from


def pages_of(*numbers: int) -> PageArray:
    return np.asarray(numbers, dtype=np.int32)


def test_the_walk_names_pages_with_two_accounts_and_with_none() -> None:
    time_s = [0.0]
    journal = PageJournal(5, lambda: time_s[0])
    journal.note(pages_of(1), "allocated", Holder("a", "a/1"))
    journal.note(pages_of(3), "freed", Holder("b"))
    time_s[0] = 2.5
    accounts = PageAccounts(total=5, free=2, cached=0, protected=0, session=2, in_flight=0)
    claims = [Claim("free", None, pages_of(0, 1)), Claim("session", Holder("a"), pages_of(2, 1))]
    findings, mismatches = audit_pool("full", accounts, claims, journal)
    assert [str(finding) for finding in findings] == [
        "page 1 of pool full is doubly accounted in free and in session (session a); "
        "last allocated by session a, request a/1 2.5 s ago",
        "page 3 of pool full is leaked; last freed by session b 2.5 s ago",
        "page 4 of pool full is leaked; never used",
    ]
    assert mismatches == []


def test_a_page_twice_in_one_claim_is_doubly_accounted() -> None:
    accounts = PageAccounts(total=2, free=2, cached=0, protected=0, session=0, in_flight=0)
    claims = [Claim("free", None, pages_of(1, 1))]
    findings, _ = audit_pool("window", accounts, claims, PageJournal(2, lambda: 0.0))
    assert [(finding.page, finding.kind) for finding in findings] == [(0, "leaked"), (1, "doubly accounted")]


def test_counters_that_the_walk_does_not_confirm_are_named() -> None:
    accounts = PageAccounts(total=2, free=0, cached=0, protected=0, session=0, in_flight=2)
    claims = [Claim("free", None, pages_of(0)), Claim("in_flight", Holder(), pages_of(1))]
    findings, mismatches = audit_pool("full", accounts, claims, PageJournal(2, lambda: 0.0))
    assert findings == []
    assert mismatches == [
        "pool full: free is 0 by its counter, 1 by the walk",
        "pool full: in_flight is 2 by its counter, 1 by the walk",
    ]


def test_a_swap_that_counts_cannot_see_is_found_by_the_walk() -> None:
    books = Books.make(page_size=4)
    kv = books.run_turn("a", tokens_from(0, 10))
    kv.replace(0, books.allocator.free_pages()[:1])
    books.sessions.books.check("balance")  # the counts still balance
    with pytest.raises(BooksError, match=r"doubly accounted in free and in session \(session a\)"):
        books.check()


def test_pages_lost_from_a_sequence_are_a_leak() -> None:
    books = Books.make(page_size=4)
    kv = books.run_turn("a", tokens_from(0, 10))
    kv.free_aligned(4)
    with pytest.raises(BooksError, match=r"page 1 of pool full is leaked.*page 2 of pool full is leaked"):
        books.check()
    books.sessions.books.check("off")


def test_the_busy_check_counts_lent_pages_once() -> None:
    books = Books.make(page_size=4)
    books.run_turn("a", tokens_from(0, 10))
    idle = books.accounts()
    assert (idle.session, idle.in_flight) == (3, 0)
    books.begin("a", tokens_from(0, 12))
    books.check()
    busy = books.accounts()
    assert (busy.session, busy.in_flight, busy.free) == (0, 3, idle.free)
