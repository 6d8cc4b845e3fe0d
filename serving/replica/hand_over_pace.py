"""How fast a draining replica hands over the sessions that are in use.

A session moves without its KV: its next owner computes its history before the first token. If all sessions moved at
once, each would wait for the histories of the others. So they move one at a time. The next session may go when the
history of the last one should have been computed. Until then its turns run here, where its KV is.
"""

from __future__ import annotations

from collections.abc import Callable


class HandOverPace:
    """Paces the sessions that leave. `clock` returns monotonic seconds. A replica computes `tokens_per_s` of a history.

    `within_s` after the drain began, all sessions may go at once: the replica is stopped soon, and its turns with it.
    """

    def __init__(self, clock: Callable[[], float], tokens_per_s: float, within_s: float) -> None:
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._within_s = within_s
        self._next_s = self._until_s = clock()

    def begin(self) -> None:
        """To be called when the drain begins."""
        self._next_s = self._clock()
        self._until_s = self._next_s + self._within_s

    def may_go(self, tokens: int) -> bool:
        """Whether a session in use, with `tokens` tokens of history, may go now. If so, the caller must offer it."""
        now_s = self._clock()
        if now_s >= self._until_s:
            return True
        if now_s < self._next_s:
            return False
        self._next_s = now_s + tokens / self._tokens_per_s
        return True

    def stayed(self) -> None:
        """No replica took the session: the next one may be offered at once."""
        self._next_s = self._clock()
