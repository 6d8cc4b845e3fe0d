"""WindowTable: entries, limits and counts agree whatever pages are forgotten or cut."""

from __future__ import annotations

import numpy as np
import pytest

from cache.pages import PageArray
from cache.window_table import GONE, WindowTable


def pages_of(*numbers: int) -> PageArray:
    return np.asarray(numbers, dtype=np.int32)


def table_with_gap() -> WindowTable:
    """A table of twelve pages. 0 and 1 have left the window, 2 and 3 are kept for a rollback, 4 to 8 are gone."""
    table = WindowTable()
    table.grow(pages_of(*range(100, 112)))
    table.forget(0, 2)
    table.first = table.gap_start = table.gap_end = 2
    table.forget(4, 9)
    table.gap_start, table.gap_end = 4, 9
    return table


def counted(table: WindowTable, num_protected: int) -> int:
    return len(table.live(num_protected))


def test_an_empty_table() -> None:
    table = WindowTable()
    assert (table.num_pages, table.last_page, len(table.live()), table.num_private(0)) == (0, None, 0, 0)
    assert table.is_live(0, 0)


def test_live_pages_leave_out_what_is_gone() -> None:
    table = table_with_gap()
    assert table.live().tolist() == [102, 103, 109, 110, 111]
    assert table.live(3, 11).tolist() == [103, 109, 110]
    assert table.is_live(2, 4)
    assert table.is_live(9, 12)
    assert not table.is_live(1, 3)
    assert not table.is_live(3, 5)
    assert table.last_page == 111


@pytest.mark.parametrize("num_protected", range(13))
def test_private_pages_are_counted_without_a_walk(num_protected: int) -> None:
    table = table_with_gap()
    assert table.num_private(num_protected) == counted(table, num_protected)


@pytest.mark.parametrize("keep", range(13))
def test_a_cut_caps_every_limit(keep: int) -> None:
    """Otherwise later pages would count as gone, or pages that are gone would be freed again."""
    table = table_with_gap()
    table.cut(keep)
    limits = (table.num_pages, table.first, table.gap_start, table.gap_end)
    assert limits == (keep, min(2, keep), min(4, keep), min(9, keep))
    assert table.num_private(0) == counted(table, 0)
    table.grow(pages_of(*range(200, 220)))
    assert table.live(keep).tolist() == list(range(200, 220))
    for num_protected in range(keep, keep + 5):
        assert table.num_private(num_protected) == counted(table, num_protected)
    table.cut(100)
    assert table.num_pages == keep + 20


def test_start_behind_a_cached_prefix_whose_beginning_is_gone() -> None:
    table = WindowTable()
    table.start_at(20, pages_of(7, 8))
    assert table.pages.tolist() == [GONE] * 20 + [7, 8]
    assert (table.first, table.gap_start, table.gap_end) == (20, 20, 20)
    assert table.live().tolist() == [7, 8]
    assert table.num_private(21) == 1
    assert table.is_live(20, 22)
    assert not table.is_live(19, 22)


def test_a_table_without_a_live_last_page_has_no_last_page() -> None:
    table = WindowTable()
    table.start_at(3, pages_of())
    assert table.last_page is None


def test_replace_points_one_entry_elsewhere() -> None:
    table = WindowTable()
    table.grow(pages_of(1, 2, 3))
    table.replace(1, 9)
    assert table.pages.tolist() == [1, 9, 3]
