"""One check finds each planted fault and names it: pool, page, session, turn, operation, age."""

from __future__ import annotations

import re

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
@pytest.mark.parametrize("kind", ["leak", "double free"])
def test_the_balance_alone_finds_leak_and_double_free_and_names_them_too(kind: FaultKind, pool: str) -> None:
    books, page = faulty(kind, pool)
    with pytest.raises(
        BooksError, match=f"{1 if kind == 'leak' else -1} pages of pool {pool} leaked"
    ) as caught:
        books.sessions.books.check("balance")
    assert f"page {page} of pool {pool} is " in str(caught.value)
    assert "by session a, request r" in str(caught.value)


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
