from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers import sorted_keys
from controllers.sorted_keys import SortedKeys

KEYS = st.text("ab ", max_size=3)


@given(st.lists(KEYS), st.lists(st.tuples(st.booleans(), KEYS), max_size=80), KEYS)
def test_against_a_set(first: list[str], steps: list[tuple[bool, str]], after: str) -> None:
    most, sorted_keys._MOST_IN_PART = sorted_keys._MOST_IN_PART, 4
    try:
        keys, known = SortedKeys(first), set(first)
        for adds, key in steps:
            if adds and key not in known:
                keys.add(key)
                known.add(key)
            elif not adds and key in known:
                keys.discard(key)
                known.discard(key)
            assert list(keys) == sorted(known)
            assert list(keys.after(after)) == sorted(each for each in known if each > after)
            assert all(0 < len(part) <= 4 for part in keys._parts)
    finally:
        sorted_keys._MOST_IN_PART = most


@pytest.mark.parametrize("count", [10, 1000, 100_000])
def test_no_part_grows_with_the_set(count: int) -> None:
    """So neither adding a key nor starting to read in the middle costs more in a large set."""
    keys = SortedKeys()
    for number in range(count):
        keys.add(f"{number * 7919 % count:06}")
    assert max(map(len, keys._parts)) <= sorted_keys._MOST_IN_PART
    assert len(keys._parts) <= 2 + 4 * count // sorted_keys._MOST_IN_PART
    assert list(islice(keys.after(f"{count // 2:06}"), 3)) == [
        f"{number:06}" for number in range(count // 2 + 1, count // 2 + 4)
    ]
