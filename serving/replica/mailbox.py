"""Passes deltas from the engine's thread to the turns on the replica's event loop.

Each engine step wakes the loop once (`loop.call_soon_threadsafe`), however many requests it served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from engine.api import TokenDelta

logger = logging.getLogger(__name__)

TakeDelta = Callable[[TokenDelta], None]


class Mailbox:
    """Passes each request's deltas to its taker. `deliver` is the engine's DeltaSink. Call the rest on the event
    loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._takers: dict[str, TakeDelta] = {}

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Called on the engine's thread. Once the loop is closed, deltas are dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, deltas)

    def open(self, request_id: str, take: TakeDelta) -> None:
        """Has `take` called on the event loop with each of the request's deltas, in order. What it raises is logged."""
        self._takers[request_id] = take

    def close(self, request_id: str) -> None:
        self._takers.pop(request_id, None)

    def _distribute(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            take = self._takers.get(delta.request_id)
            if take is not None:
                try:
                    take(delta)
                except Exception:  # it concerns one request: the others must get their deltas
                    logger.exception("request %s: its delta was not taken", delta.request_id)
