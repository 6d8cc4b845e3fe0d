"""One check finds each planted fault and names it: pool, page, session, turn, operation, age."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cache.journal import Holder
from cache.pages import BooksError
from tests.unit.cache.books import Books, tokens_from
from tests.unit.cache.planted_faults import FaultKind, plant

KINDS: tuple[FaultKind, ...] = ("leak", "double free", "double count")
LAST = r"last {operation} by session a, request r \d+\.\d s ago"


def faulty(kind: FaultKind, pool: str, page_size: int = 4) -> tuple[Books, int]:
    """Three sessions. The second has the fault."""
    books = Books.make(page_size, 64, window_len=2 * page_size if pool == "window" else None)
    for first, name in enumerate("bac"):
        books.run_turn(name, tokens_from(10_000 * first, 2 * page_size + 2), share=name != "a")
    return books, plant(books.sessions, kind, "a", pool)  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", ["full", "window"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4, 16, 256])
def test_a_strict_check_finds_and_names_it(kind: FaultKind, pool: str, page_size: int) -> None:
    books, page = faulty(kind, pool, page_size)
    with pytest.raises(BooksError) as caught:
        books.check()
    operation = "freed" if kind == "double free" else "allocated"
    what = "leaked" if kind == "leak" else r"doubly accounted in \w+.* and in session \(session a\)"
    named = rf"page {page} of pool {pool} is {what}; " + LAST.format(operation=operation)
    assert re.search(named, str(caught.value)), caught.value


@pytest.mark.parametrize("pool", ["full", "window"])
def test_the_balance_alone_finds_a_double_free_and_names_it_too(pool: str) -> None:
    books, page = faulty("double free", pool)
    with pytest.raises(BooksError, match=f"page {page} of pool {pool} is doubly .*by session a, request r"):
        books.sessions.books.check("balance")


@pytest.mark.parametrize("pool", ["full", "window"])
def test_a_leak_balances_and_is_told_once(pool: str, caplog: pytest.LogCaptureFixture) -> None:
    books, page = faulty("leak", pool)
    for _ in range(2):
        books.sessions.books.check("balance")
    (told,) = caplog.messages
    assert re.search(rf"page {page} of pool {pool} is leaked; " + LAST.format(operation="allocated"), told)


def test_leaks_are_told_again_when_they_have_doubled(caplog: pytest.LogCaptureFixture) -> None:
    """Telling walks all pages, which a leak at every turn must not do at every turn."""
    books = Books.make(1)
    books.run_turn("a", tokens_from(0, 9))
    told = []
    for _ in range(7):
        plant(books.sessions, "leak", "a")
        books.sessions.books.check("balance")
        told.append(len(caplog.messages))
    assert told == [1, 1, 2, 2, 2, 2, 3]


def test_leaks_do_not_hide_a_double_free() -> None:
    books = Books.make(1)
    for first, name in enumerate("ab"):
        books.run_turn(name, tokens_from(100 * first, 9))
    for _ in range(2):
        plant(books.sessions, "leak", "a")
    plant(books.sessions, "double free", "b")
    assert books.sessions.books.accounts().leaked == 1
    with pytest.raises(BooksError, match="doubly accounted"):
        books.sessions.books.check("balance")


@pytest.mark.parametrize("told", [1, 3])
def test_leaks_that_were_told_do_not_hide_a_double_free(told: int) -> None:
    """There are still more pages without an account than with two. With three leaks, the last is not told."""
    books = Books.make(1)
    for first, name in enumerate("ab"):
        books.run_turn(name, tokens_from(100 * first, 9))
    for _ in range(told):
        plant(books.sessions, "leak", "a")
        books.sessions.books.check("balance")
    plant(books.sessions, "double free", "b")
    with pytest.raises(BooksError, match="doubly accounted"):
        books.sessions.books.check("balance")


def test_a_leak_that_ends_stops_nothing_and_the_next_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A planted fault ends: its page comes back."""
    books, page = faulty("leak", "full")
    books.sessions.books.check("balance")
    books.sessions._inner.allocator.free(np.array([page], dtype=np.int32))
    books.sessions.books.check("balance")
    assert len(caplog.messages) == 1
    plant(books.sessions, "leak", "a")
    books.sessions.books.check("balance")
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("pool", ["full", "window"])
def test_a_double_count_balances_and_only_the_walk_sees_it(pool: str) -> None:
    """The counters move with the KV, so they cannot show that the slot kept the KV as well. Only a strict check
    looks."""
    books, page = faulty("double count", pool)
    books.sessions.books.check("balance")
    report = books.sessions.books.audit()
    found = [finding for finding in report.findings if (finding.pool, finding.page) == (pool, page)]
    assert [finding.kind for finding in found] == ["doubly accounted"]
    assert sorted(found[0].accounts) == ["in_flight (session a, request r)", "session (session a)"]
    assert found[0].last is not None
    assert found[0].last.holder == Holder("a", "r")
    assert not report.clean


def test_only_the_damaged_session_is_named() -> None:
    for kind in KINDS:
        books, page = faulty(kind, "full")
        findings = books.sessions.books.audit().findings
        assert page in {finding.page for finding in findings}
        assert {finding.last.holder.session_id for finding in findings if finding.last} == {"a"}


def test_what_cannot_be_damaged_is_refused_and_left_whole() -> None:
    books = Books.make(4)
    books.run_turn("a", tokens_from(0, 9), share=True)
    with pytest.raises(ValueError, match="session a has no private page in pool full"):
        plant(books.sessions, "leak", "a")
    with pytest.raises(ValueError, match="session b holds no KV"):
        plant(books.sessions, "leak", "b")
    with pytest.raises(ValueError, match="no window pool"):
        plant(books.sessions, "leak", "a", "window")
    books.begin("a", tokens_from(0, 12))
    with pytest.raises(ValueError, match="session a holds no KV"):
        plant(books.sessions, "leak", "a")
    books.check()
