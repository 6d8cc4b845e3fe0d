from __future__ import annotations

import pytest

from controllers.errors import NoReplica
from controllers.placement import Candidate, choose_replica


def test_most_free_wins() -> None:
    assert choose_replica([Candidate("a", 100, 0, 0), Candidate("b", 200, 0, 9)]) == "b"


def test_tokens_assigned_since_count() -> None:
    assert choose_replica([Candidate("a", 100, 0, 0), Candidate("b", 200, 150, 0)]) == "a"


def test_ties_go_to_fewer_sessions_then_to_the_smaller_id() -> None:
    assert choose_replica([Candidate("a", 100, 0, 2), Candidate("b", 100, 0, 1)]) == "b"
    assert choose_replica([Candidate("b", 100, 0, 1), Candidate("a", 100, 0, 1)]) == "a"


def test_a_full_replica_is_better_than_none() -> None:
    assert choose_replica([Candidate("a", 0, 500, 5)]) == "a"


def test_who_has_some_of_its_kv_wins_unless_another_has_twice_as_much_room() -> None:
    """A conversation that is sent whole, and stored as a new session each time, used to go to the most free KV."""
    candidates = [Candidate("a", 100, 0, 9), Candidate("b", 200, 0, 0)]
    assert choose_replica(candidates, "a") == "a"
    assert choose_replica(candidates, "c") == "b", "it is gone"
    assert choose_replica([Candidate("a", 100, 1, 9), Candidate("b", 200, 0, 0)], "a") == "b"


def test_nobody_left() -> None:
    with pytest.raises(NoReplica):
        choose_replica([])
