"""From the engine's thread to the requests that wait on the replica's event loop.

One hand-over per engine step, however many requests it served: `loop.call_soon_threadsafe` wakes the loop once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.api import TokenDelta


class Inbox:
    """Deltas of one request that nobody has read yet. Used on the event loop only, with one reader."""

    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []
        self._arrived = asyncio.Event()

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    async def take(self, timeout_s: float) -> list[TokenDelta]:
        """Everything that has arrived, at least one delta; an empty list if nothing came in time."""
        if not self._deltas:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        self._arrived.clear()
        deltas, self._deltas = self._deltas, []
        return deltas


class Mailbox:
    """Inboxes by request id. `deliver` is the engine's DeltaSink; the rest belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._inboxes: dict[str, Inbox] = {}

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Called on the engine's thread. After the loop has closed nobody reads, and news is dropped."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._distribute, deltas)

    def open(self, request_id: str) -> Inbox:
        inbox = self._inboxes[request_id] = Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        self._inboxes.pop(request_id, None)

    def _distribute(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.put(delta)
