"""Overlapping turns of a session: a turn may come before the replica hears that the client of the last one has left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from serving.wire.turns import SessionTurn

OVERLAP_PATIENCE_S = 1.0
"""How long a turn waits to hear that the client of the turn before it has left. That news and the new turn travel
separately, so either may arrive first."""
SHORT_PATIENCE_S = 0.1
"""The same for a turn that can run without its session: if the news is late, its KV may have to be computed again."""


def patience_s(session: SessionTurn) -> float:
    """How long the turn waits for the end of another one."""
    return SHORT_PATIENCE_S if session.fallback else OVERLAP_PATIENCE_S


class Overlaps:
    """Knows whether the clients of turns are still there. Used on the replica's event loop only."""

    def __init__(self) -> None:
        self._clients: dict[str, tuple[str | None, asyncio.Future[bool]]] = {}
        """By session: its turn's key, and whether that turn's client has left, once it is no longer there."""

    @contextmanager
    def client(self) -> Iterator[asyncio.Future[bool]]:
        """Wraps the run of a turn, which is cancelled when its client leaves. The future tells whether the client has
        left."""
        left: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        try:
            yield left
        except asyncio.CancelledError:
            if not left.done():
                left.set_result(True)
            raise
        finally:
            if not left.done():
                left.set_result(False)

    def has_turn(self, session_id: str, key: str | None, left: asyncio.Future[bool]) -> None:
        """The turn of this client has the session from now on, until the client leaves or is answered. `key` is the
        turn's idempotency key."""
        self._clients[session_id] = key, left
        left.add_done_callback(lambda _: self._forget(session_id, left))

    async def over(self, session_id: str, key: str | None, until_s: float) -> bool:
        """Whether the session's turn no longer keeps away one with `key`: True as soon as its client has left, or is
        answered if it has the same key. False once its client is answered otherwise, or at `until_s` (the event loop's
        time)."""
        client = self._clients.get(session_id)
        if client is None:
            return False
        key_of_turn, left = client
        timeout_s = until_s - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait([left], timeout=max(0.0, timeout_s))
        return bool(done) and (left.result() or (key is not None and key == key_of_turn))

    def _forget(self, session_id: str, left: asyncio.Future[bool]) -> None:
        client = self._clients.get(session_id)
        if client is not None and client[1] is left:
            del self._clients[session_id]
