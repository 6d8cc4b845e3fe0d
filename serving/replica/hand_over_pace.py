"""How fast a replica that drains lets go of the sessions that are in use.

A session that moves brings no KV along: its next owner computes its history before the first token. Where all sessions
come at once, each waits there for the histories of the others. So one goes at a time: the next one may go when the
history of the last should have been computed, and has its turns where its KV is until then.
"""

from __future__ import annotations

from collections.abc import Callable


class HandOverPace:
    """`clock` returns monotonic seconds. A replica computes `tokens_per_s` of a history. After `within_s` of a drain
    all may go at once: the replica is stopped soon, and its turns with it."""

    def __init__(self, clock: Callable[[], float], tokens_per_s: float, within_s: float) -> None:
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._within_s = within_s
        self._next_s = self._until_s = clock()

    def begin(self) -> None:
        """The drain begins now."""
        self._next_s = self._clock()
        self._until_s = self._next_s + self._within_s

    def may_go(self, tokens: int) -> bool:
        """Whether a session in use, with so many tokens of history, may go now. If so it is expected to."""
        now_s = self._clock()
        if now_s >= self._until_s:
            return True
        if now_s < self._next_s:
            return False
        self._next_s = now_s + tokens / self._tokens_per_s
        return True

    def stayed(self) -> None:
        """Nobody took it: the next one may be tried at once."""
        self._next_s = self._clock()
