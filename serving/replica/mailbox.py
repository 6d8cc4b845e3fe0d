"""From the engine's thread to the turns on the replica's event loop.

One hand-over per engine step, however many requests it served: `loop.call_soon_threadsafe` wakes the loop once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine.api import TokenDelta

logger = logging.getLogger(__name__)

TakeDelta = Callable[[TokenDelta], None]


class Mailbox:
    """Who takes the deltas of which request. `deliver` is the engine's DeltaSink; the rest is the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._takers: dict[str, TakeDelta] = {}

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Called on the engine's thread. After the loop has closed nobody reads, and deltas are dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, deltas)

    def open(self, request_id: str, take: TakeDelta) -> None:
        """`take` is called on the event loop with each of the request's deltas, in order. What it raises is logged."""
        self._takers[request_id] = take

    def close(self, request_id: str) -> None:
        self._takers.pop(request_id, None)

    def _distribute(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            take = self._takers.get(delta.request_id)
            if take is not None:
                try:
                    take(delta)
                except Exception:  # of one request: others are not to suffer from it
                    logger.exception("request %s: its delta was not taken", delta.request_id)
