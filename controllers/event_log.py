"""EventLog: what lately happened to sessions and replicas, for those who watch. Pure logic, bounded, one owner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from controllers.records import ClusterEvent

MOST_EVENTS = 1000
"""Kept. Who reads more rarely than so many happen misses the oldest."""


class EventLog:
    """Events in the order in which they happened. `clock` returns Unix time in seconds.

    A cursor is an event's number behind the log's name. A log that is new, as that of a restarted controller is, does
    not know cursors of the one before: their readers get all that it has.
    """

    def __init__(self, clock: Callable[[], float], most: int = MOST_EVENTS) -> None:
        self._clock = clock
        self._name = repr(clock())
        self._events: deque[ClusterEvent] = deque(maxlen=most)
        self._number = 0

    def note(
        self,
        kind: str,
        session_id: str | None = None,
        replica_id: str | None = None,
        to_replica_id: str | None = None,
        detail: str = "",
    ) -> None:
        """It has just happened. `kind` is one of records.EVENT_KINDS."""
        self._number += 1
        self._events.append(
            ClusterEvent(self._number, self._clock(), kind, session_id, replica_id, to_replica_id, detail)
        )

    def after(self, cursor: str | None) -> tuple[tuple[ClusterEvent, ...], str]:
        """What is kept of the events behind the cursor (None: of all), and the cursor of the last one."""
        name, _, number = (cursor or "").partition("/")
        seen = int(number) if name == self._name and number.isdigit() else 0
        num_new = max(0, self._number - seen)
        skipped = max(0, len(self._events) - num_new)
        return tuple(islice(self._events, skipped, None)), f"{self._name}/{self._number}"
