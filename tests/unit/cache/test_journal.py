"""PageJournal: the last operation on each page, its holder and its age."""

from __future__ import annotations

import numpy as np

from cache.journal import NOBODY, Holder, PageJournal, PageTrace
from cache.pages import PageAllocator
from tests.unit.cache.books import Books, joined, tokens_from


def test_the_last_operation_counts_and_ages() -> None:
    time_s = [5.0]
    journal = PageJournal(4, lambda: time_s[0])
    assert journal.last(2) is None
    journal.note(np.array([1, 2], dtype=np.int32), "allocated", Holder("s", "r"))
    time_s[0] = 6.5
    journal.note(np.array([2], dtype=np.int32), "freed", NOBODY)
    journal.note(np.array([], dtype=np.int32), "freed", NOBODY)
    time_s[0] = 8.0
    assert journal.last(1) == PageTrace("allocated", Holder("s", "r"), 3.0)
    assert journal.last(2) == PageTrace("freed", NOBODY, 1.5)
    assert str(journal.last(1)) == "last allocated by session s, request r 3.0 s ago"
    assert str(journal.last(2)) == "last freed by no session 1.5 s ago"


def test_the_allocator_writes_it() -> None:
    time_s = [0.0]
    allocator = PageAllocator(4, lambda: time_s[0])
    pages = allocator.allocate(2, holder=Holder("s", "r"))
    assert pages is not None
    time_s[0] = 1.0
    allocator.free(pages[:1], Holder("t"), "evicted")
    assert allocator.journal.last(int(pages[0])) == PageTrace("evicted", Holder("t"), 0.0)
    assert allocator.journal.last(int(pages[1])) == PageTrace("allocated", Holder("s", "r"), 1.0)


def test_a_page_s_life_is_told_in_the_words_of_the_books() -> None:
    books = Books.make(4, num_pages=16)
    tokens = tokens_from(0, 9)

    def last(page: int) -> tuple[str, Holder]:
        trace = books.allocator.journal.last(page)
        assert trace is not None
        return trace.operation, trace.holder

    kv = books.begin("a", tokens)
    books.fill(kv, 8)
    first = int(kv.pages[0])
    assert last(first) == ("allocated", Holder("a", "r"))
    books.sessions.cache_unfinished(kv, tokens)
    assert last(first) == ("shared", Holder("a", "r"))
    books.sessions.finish_turn("a", kv, tokens)
    twin = books.prefixes.begin(books.prefixes.match_prefix("", tokens_from(0, 4)), Holder("b", "twin"))
    books.fill(twin, 8)
    duplicate = int(twin.pages[1])
    books.sessions.cache_unfinished(twin, tokens)
    assert last(duplicate) == ("freed as a duplicate", Holder("b", "twin"))
    books.prefixes.release(twin)
    books.sessions.release_session("a")
    assert last(first) == ("shared", Holder("a", "r")), "it is the tree's"
    books.sessions.flush()
    assert last(first) == ("evicted", NOBODY)
    kv = books.begin("c", joined(tokens, tokens))
    books.fill(kv, 5)
    page = int(kv.pages[1])
    books.sessions.give_back(kv, "c", tokens, 2)
    assert last(page) == ("freed", Holder("c", "r"))
