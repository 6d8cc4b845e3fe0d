"""SequenceKV: lengths and the page table move together."""

from __future__ import annotations

import numpy as np
import pytest

from cache.pages import PageArray
from cache.sequence_kv import PageAccount, SequenceKV, pages_for
from tests.unit.cache.books import PAGE_SIZES, no_chain


def pages_of(*numbers: int) -> PageArray:
    return np.asarray(numbers, dtype=np.int32)


@pytest.mark.parametrize(
    ("num_tokens", "page_size", "expected"),
    [(0, 1, 0), (1, 1, 1), (7, 1, 7), (0, 16, 0), (16, 16, 1), (17, 16, 2), (256, 256, 1), (257, 256, 2)],
)
def test_pages_for_rounds_up(num_tokens: int, page_size: int, expected: int) -> None:
    assert pages_for(num_tokens, page_size) == expected


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_grow_by_one_token_takes_a_page_at_each_border_only(page_size: int) -> None:
    kv = SequenceKV(no_chain(page_size), PageAccount())
    for length in range(1, 3 * page_size + 1):
        missing = kv.pages_missing(length)
        assert missing == (1 if (length - 1) % page_size == 0 else 0)
        first = kv.num_pages
        kv.grow(pages_of(*range(first, first + missing)), length)
        assert (kv.allocated_len, kv.num_pages) == (length, pages_for(length, page_size))
    assert kv.pages.tolist() == [0, 1, 2]
    assert kv.last_page == 2
    assert kv.contiguous


def test_an_empty_sequence_has_no_last_page() -> None:
    kv = SequenceKV(no_chain(4), PageAccount())
    assert kv.last_page is None
    assert (kv.num_pages, kv.num_private_pages, kv.contiguous) == (0, 0, True)


def test_growing_keeps_the_pages_already_there() -> None:
    kv = SequenceKV(no_chain(1), PageAccount())
    expected = []
    for page in range(0, 400, 2):
        kv.grow(pages_of(page), len(expected) + 1)
        expected.append(page)
    assert kv.pages.tolist() == expected
    assert not kv.contiguous


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_free_aligned_keeps_the_part_filled_page(page_size: int) -> None:
    kv = SequenceKV(no_chain(page_size), PageAccount())
    kv.grow(pages_of(5, 6, 9, 10), 4 * page_size)
    kv.commit(4 * page_size, None)
    target = page_size + 1
    freed = kv.free_aligned(target)
    assert freed.tolist() == [9, 10]
    assert kv.pages.tolist() == [5, 6]
    assert (kv.allocated_len, kv.committed_len) == (target, target)
    assert kv.contiguous, "the break went with the freed pages"


def test_free_aligned_to_the_same_or_a_greater_length_is_a_no_op() -> None:
    kv = SequenceKV(no_chain(4), PageAccount())
    kv.grow(pages_of(1, 2), 7)
    kv.commit(5, None)
    for target in (7, 8, 100):
        assert len(kv.free_aligned(target)) == 0
    assert (kv.allocated_len, kv.committed_len, kv.num_pages) == (7, 5, 2)


def test_free_aligned_never_cuts_the_protected_prefix() -> None:
    kv = SequenceKV(no_chain(4), PageAccount())
    kv.grow(pages_of(1, 2), 8)
    kv.commit(8, None)
    kv.protect(8)
    with pytest.raises(AssertionError):
        kv.free_aligned(4)


def test_freed_pages_are_a_copy() -> None:
    kv = SequenceKV(no_chain(1), PageAccount())
    kv.grow(pages_of(1, 2, 3), 3)
    freed = kv.free_aligned(1)
    kv.grow(pages_of(8, 9), 3)
    assert freed.tolist() == [2, 3]


def test_private_pages_are_those_past_the_protected_prefix() -> None:
    kv = SequenceKV(no_chain(4), PageAccount())
    kv.grow(pages_of(1, 2, 3), 10)
    kv.commit(10, None)
    kv.protect(8)
    assert kv.private_pages.tolist() == [3]
    assert kv.num_private_pages == 1


def test_replace_rechecks_contiguity() -> None:
    kv = SequenceKV(no_chain(1), PageAccount())
    kv.grow(pages_of(1, 2, 3), 3)
    kv.replace(1, pages_of(7))
    assert (kv.pages.tolist(), kv.contiguous) == ([1, 7, 3], False)
    kv.replace(1, pages_of(2))
    assert (kv.pages.tolist(), kv.contiguous) == ([1, 2, 3], True)


def test_repr_names_every_length() -> None:
    kv = SequenceKV(no_chain(4), PageAccount())
    kv.grow(pages_of(1), 3)
    assert repr(kv) == "SequenceKV(pages=1, allocated=3, committed=0, protected=0)"
