from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controllers.deadlines import Deadlines

NAMES = st.sampled_from("abcdefgh")
TIMES = st.integers(0, 20).map(float)


class Watched:
    """Deadlines of a few names. Counts how often a name's deadline is looked up."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}
        self.asked = 0
        self.deadlines = Deadlines(self._due_at)

    def _due_at(self, name: str) -> float:
        self.asked += 1
        return self.at_s[name]

    def watch(self, name: str, at_s: float) -> None:
        self.at_s[name] = at_s
        self.deadlines.watch(name, at_s)

    def forget(self, name: str) -> None:
        if self.at_s.pop(name, None) is not None:
            self.deadlines.forget(name)


@given(st.lists(st.tuples(st.sampled_from(["watch", "later", "gone", "look"]), NAMES, TIMES), max_size=60))
def test_whoever_is_due_is_found(steps: list[tuple[str, str, float]]) -> None:
    """The reference looks at all names. Names come back, and deadlines move without notice."""
    watched = Watched()
    for what, name, at_s in steps:
        if what == "watch":
            watched.watch(name, at_s)
        elif what == "later" and name in watched.at_s:
            watched.at_s[name] = max(watched.at_s[name], at_s)
        elif what == "gone":
            watched.forget(name)
        elif what == "look":
            due = list(watched.deadlines.due(at_s))
            assert sorted(due) == sorted(each for each, when in watched.at_s.items() if when < at_s)
            assert len(set(due)) == len(due)
            soonest_s = watched.deadlines.soonest_s()
            later = [when for when in watched.at_s.values() if when >= at_s]
            assert not later or soonest_s is not None
            assert due or not later or soonest_s <= min(later)
        assert len(watched.deadlines) == len(watched.at_s)


@pytest.mark.parametrize("count", [100, 10_000])
def test_only_those_are_looked_at_that_are_due_or_were_used(count: int) -> None:
    watched = Watched()
    for number in range(count):
        watched.watch(str(number), 1000.0 + number)
    for name in ("0", "1", "2"):
        watched.at_s[name] = 5000.0
    watched.asked = 0
    assert list(watched.deadlines.due(1005.0)) == ["3", "4"]
    assert watched.asked == 5
    watched.asked = 0
    for _ in range(100):
        assert list(watched.deadlines.due(1005.0)) == ["3", "4"]
    assert watched.asked == 200, "what is due stays due until it is gone"


def test_names_may_be_forgotten_while_they_are_read() -> None:
    watched = Watched()
    for number in range(1000):
        watched.watch(f"{number:03}", float(number))
    read = []
    for name in watched.deadlines.due(500.0):
        read.append(name)
        watched.forget(name)
        if len(read) == 3:
            watched.watch("new", 2.5)
    assert read == ["000", "001", "002", "new", *(f"{number:03}" for number in range(3, 500))]
    assert len(watched.deadlines) == 500


def test_whoever_stops_reading_has_looked_at_no_others() -> None:
    watched = Watched()
    for number in range(1000):
        watched.watch(str(number), float(number))
    assert next(watched.deadlines.due(2000.0)) == "0"
    assert watched.asked == 1
    assert len(list(watched.deadlines.due(2000.0))) == 1000
