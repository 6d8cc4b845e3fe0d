"""LostKV: which sessions' KV was dropped for lack of room, and which of them then came back for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

MISSED_FOR_S = 60.0
MOST_REMEMBERED = 4096
"""Sessions whose KV was dropped and that have not come back. Those dropped first are forgotten first."""


class LostKV:
    """If a session never comes back, it was right to drop its KV; if it does, there was too little room. Counts pages
    of the full pool.

    Owned by the cache and used on its thread only. `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._dropped: OrderedDict[str, int] = OrderedDict()
        self._missed: OrderedDict[str, tuple[float, int]] = OrderedDict()  # when, and pages; oldest first

    def drop(self, session_id: str, num_pages: int) -> None:
        """The session's KV was dropped since no tier had room for it; only the session log remains."""
        self._dropped[session_id] = num_pages
        self._dropped.move_to_end(session_id)
        if len(self._dropped) > MOST_REMEMBERED:
            self._dropped.popitem(last=False)

    def begin(self, session_id: str) -> None:
        """A turn of the session begins without its KV and computes it again."""
        num_pages = self._dropped.pop(session_id, None)
        if num_pages is not None:
            self._missed[session_id] = self._clock(), num_pages
            self._missed.move_to_end(session_id)

    def forget(self, session_id: str) -> None:
        """The session is closed or moved: its KV will not be missed here."""
        self._dropped.pop(session_id, None)

    def missed(self) -> list[int]:
        """Pages of each session that began a turn without its KV within the last MISSED_FOR_S."""
        oldest_s = self._clock() - MISSED_FOR_S
        while self._missed:
            session_id, (when_s, _) = next(iter(self._missed.items()))
            if when_s > oldest_s:
                break
            del self._missed[session_id]
        return [num_pages for _, num_pages in self._missed.values()]
