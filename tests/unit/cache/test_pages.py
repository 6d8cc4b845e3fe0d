"""PageAllocator: every page is free or given out once. Pages come as runs where possible."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cache.free_runs import FreeRuns, ascending_runs
from cache.pages import BooksError, PageAllocator, PageArray, PageCounts, no_pages
from tests.unit.operations import bytecodes, peak_bytes


def pages_of(*numbers: int) -> PageArray:
    return np.asarray(numbers, dtype=np.int32)


def take(allocator: PageAllocator, count: int, after: int | None = None) -> list[int]:
    pages = allocator.allocate(count, after)
    assert pages is not None
    return pages.tolist()


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        PageAllocator(0)


def test_all_pages_can_be_taken_once() -> None:
    allocator = PageAllocator(5)
    taken = take(allocator, 2) + take(allocator, 3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0
    assert allocator.free_pages().tolist() == []


def test_too_large_an_allocation_changes_nothing() -> None:
    allocator = PageAllocator(4)
    take(allocator, 3)
    before = allocator.free_pages().tolist()
    assert allocator.allocate(2) is None
    assert allocator.allocate(2, after=0) is None
    assert (allocator.num_free, allocator.free_pages().tolist()) == (1, before)


def test_nothing_is_a_fine_thing_to_take_and_to_give_back() -> None:
    allocator = PageAllocator(1)
    take(allocator, 1)
    assert take(allocator, 0) == []
    allocator.free(no_pages())
    assert allocator.num_free == 0


def test_double_free_is_named_and_changes_nothing() -> None:
    allocator = PageAllocator(8)
    pages = pages_of(*take(allocator, 8))
    allocator.free(pages[2:4])
    with pytest.raises(BooksError, match=r"double free of pages \[3\]"):
        allocator.free(pages_of(7, 3, 5))
    assert allocator.num_free == 2
    assert 7 not in allocator.free_pages()


def test_a_page_named_twice_in_one_call_is_a_double_free() -> None:
    allocator = PageAllocator(4)
    take(allocator, 4)
    with pytest.raises(BooksError, match=r"double free of pages \[1, 2, 1\]"):
        allocator.free(pages_of(1, 2, 1))
    assert allocator.num_free == 0


def test_a_sequence_grows_right_after_its_last_page() -> None:
    allocator = PageAllocator(10)
    first = take(allocator, 2)
    assert take(allocator, 3, after=first[-1]) == [2, 3, 4]


def test_growth_past_the_end_or_into_a_neighbour_goes_elsewhere() -> None:
    allocator = PageAllocator(6)
    take(allocator, 6)
    allocator.free(pages_of(0, 1, 2, 4))
    assert take(allocator, 2, after=5) == [0, 1]
    assert take(allocator, 2, after=1) == [2, 4]


def test_a_new_sequence_starts_in_the_middle_of_the_largest_gap() -> None:
    allocator = PageAllocator(16)
    first = take(allocator, 2)
    second = take(allocator, 2)
    assert second == [9, 10], "half of the gap stays for the first one's growth"
    assert take(allocator, 7, after=first[-1]) == list(range(2, 9))


def test_scattered_pages_serve_when_no_run_is_long_enough() -> None:
    allocator = PageAllocator(6)
    take(allocator, 6)
    allocator.free(pages_of(0, 2, 4))
    assert take(allocator, 3) == [0, 2, 4]


def test_random_traffic_keeps_counts_and_marks_together() -> None:
    rng = random.Random(7)
    allocator = PageAllocator(64)
    held: list[list[int]] = []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            allocator.free(pages_of(*held.pop(rng.randrange(len(held)))))
        else:
            after = held[-1][-1] if held and held[-1] and rng.random() < 0.5 else None
            pages = allocator.allocate(rng.randrange(9), after)
            if pages is not None:
                held.append(pages.tolist())
        given = [page for pages in held for page in pages]
        assert len(set(given)) == len(given)
        assert allocator.num_free == 64 - len(given)
        assert sorted(given + allocator.free_pages().tolist()) == list(range(64))


def test_what_a_page_costs_does_not_depend_on_the_pool() -> None:
    """Tries pools with only a few scattered free pages, and pools that are half free."""

    def traffic(num_pages: int, every: int) -> tuple[int, int]:
        allocator = PageAllocator(num_pages)
        take(allocator, num_pages // 2)
        if every:
            rest = take(allocator, num_pages - num_pages // 2)
            allocator.free(pages_of(*rest[: 64 * every : every]))

        def call() -> None:
            pages = allocator.allocate(3)
            assert pages is not None
            last = int(pages[-1])
            allocator.free(pages)
            more = allocator.allocate(1, after=last)
            assert more is not None
            allocator.free(more)

        return bytecodes(call), peak_bytes(call)

    for every in (0, 2, 3):
        (few, few_bytes), (many, many_bytes) = traffic(1000, every), traffic(100_000, every)
        assert many <= few + 100, "a heap of 64 gaps or 64 gaps"
        assert many_bytes <= few_bytes + 2000
        assert many_bytes < 10_000, "no array of the pool's size"


def test_runs_that_touch_are_one() -> None:
    runs = FreeRuns(10)
    runs.take(0, 0, 10)
    for page in (4, 2, 3, 9, 0):
        runs.add(page, page + 1)
    assert (len(runs), runs.largest(), runs.length_at(0), runs.length_at(3)) == (3, (2, 3), 1, 0)


def test_the_heap_of_gaps_stays_as_small_as_their_number() -> None:
    runs = FreeRuns(1000)
    runs.take(0, 0, 1000)
    for turn in range(5000):
        page = 2 * (turn % 20)
        runs.add(page, page + 1)
        runs.take(page, 0, 1)
    assert len(runs._by_length) <= 64 + 2


def test_pages_are_told_by_their_runs() -> None:
    assert ascending_runs(no_pages()) == []
    assert ascending_runs(pages_of(7)) == [(7, 8)]
    assert ascending_runs(pages_of(3, 4, 5, 9, 8, 2, 3)) == [(3, 6), (9, 10), (8, 9), (2, 4)]


def test_page_counts_fit_if_each_pool_has_as_many() -> None:
    assert PageCounts(3, 1) + PageCounts(2) == PageCounts(5, 1)
    assert PageCounts(3, 1) - PageCounts(4, 1) == PageCounts(-1, 0)
    room = PageCounts(3, 2)
    assert PageCounts(3, 2).fits_in(room)
    assert not PageCounts(4, 0).fits_in(room)
    assert not PageCounts(0, 3).fits_in(room)
