"""The owner of each session in the log, and whether each move was necessary. Pauses and planned changes may not cause
other moves.

A session leaves its replica only for a reason. It never goes to a replica that is known to go while there is another.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.expectations import Expectations
from tests.simulation.records import UNKNOWN, Life, LogListener
from tests.simulation.truth import Truth


class Placements(LogListener):
    """Checks every opening and move of a session. `asked_for` tells whether an operator has asked for a session to be
    moved to a replica. `evens_out`: sessions may move to less busy replicas."""

    def __init__(
        self,
        expectations: Expectations,
        truth: Truth,
        asked_for: Callable[[str, str], bool],
        *,
        evens_out: bool,
    ) -> None:
        self._expectations = expectations
        self._truth = truth
        self._asked_for = asked_for
        self._evens_out = evens_out
        self._owners: dict[str, str] = {}
        self._parents: dict[str, str | None] = {}

    def opened(self, life: Life, replica_id: str, parent_id: str | None) -> None:
        """A fork begins at its parent's replica, even if that replica is about to go."""
        self._owners[life.session_id] = replica_id
        self._parents[life.session_id] = parent_id
        if parent_id is None:
            self._check_taker(life.session_id, replica_id)

    def moved(self, life: Life, replica_id: str) -> None:
        session_id = life.session_id
        former = self._owners[session_id]
        self._owners[session_id] = replica_id
        if self._joins_parent(life, replica_id):
            return
        owner = self._expectations.replica(former)
        asked = self._evens_out or self._asked_for(session_id, replica_id)
        if owner is not None and not asked and not self._expectations.may_be_gone(owner):
            self._truth.wrong(f"{session_id} was moved from {former} to {replica_id}, with no cause")
        self._check_taker(session_id, replica_id)

    def _joins_parent(self, life: Life, replica_id: str) -> bool:
        """Whether the move is that of a repeated fork, which follows its parent."""
        parent_id = self._parents[life.session_id]
        if parent_id == UNKNOWN:
            return not life.turns
        return parent_id is not None and self._owners.get(parent_id) == replica_id

    def _check_taker(self, session_id: str, replica_id: str) -> None:
        taker = self._expectations.replica(replica_id)
        if taker is None or not self._expectations.has_others(taker):
            return
        if self._expectations.must_be_known_to_go(taker):
            self._truth.wrong(f"{session_id} was given to {replica_id}, which is to go")
