"""EventLog: recent events of sessions and replicas, for watchers. Pure logic, bounded, one owner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from controllers.records import ClusterEvent

MOST_EVENTS = 1000
"""How many events are kept. A reader that falls further behind misses the oldest."""


class EventLog:
    """Events in the order in which they happened. `clock` returns Unix time in seconds.

    A cursor is the log's name and an event's number. A new log, such as that of a restarted controller, does not know
    the cursors of an earlier one: their readers get all events that it has.
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
        """Adds an event that has just happened. `kind` is one of records.EVENT_KINDS."""
        self._number += 1
        self._events.append(
            ClusterEvent(self._number, self._clock(), kind, session_id, replica_id, to_replica_id, detail)
        )

    def after(self, cursor: str | None) -> tuple[tuple[ClusterEvent, ...], str]:
        """The kept events after the cursor (None: all that are kept), and the cursor of the last one."""
        name, _, number = (cursor or "").partition("/")
        seen = int(number) if name == self._name and number.isdigit() else 0
        num_new = max(0, self._number - seen)
        skipped = max(0, len(self._events) - num_new)
        return tuple(islice(self._events, skipped, None)), f"{self._name}/{self._number}"
