"""A turn as its ingress holds it for the client: wherever the turn is at the moment, here an abort finds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.front.turn_progress import TurnProgress
from serving.logs.call_facts import CallFacts
from serving.trace.turn_traces import FrontTrace
from serving.wire.turns import TurnCall

ABORT_TIMEOUT_S = 2.0
"""So long may a turn that is aborted look for a replica. One that has it tells how it ended; it may have committed."""


class TurnAborted(Exception):
    """The turn was aborted while no replica had it."""


class DispatchedTurn:
    """Owned by its dispatch, from the client's call to the last event. Used on the ingress's event loop only.

    `progress` is what of it the client has been sent, `trace` and `facts` are told what becomes of it.
    """

    def __init__(self, call: TurnCall, trace: FrontTrace, facts: CallFacts) -> None:
        self.call = call
        self.trace = trace
        self.facts = facts
        self.progress = TurnProgress()
        self.aborted = False
        self._search: asyncio.Timeout | None = None

    def abort(self) -> None:
        if self.aborted:
            return
        self.aborted = True
        if self._search is not None:
            self._search.reschedule(asyncio.get_running_loop().time() + ABORT_TIMEOUT_S)

    @asynccontextmanager
    async def search(self) -> AsyncIterator[None]:
        """Around a search for a replica that answers. Raises TurnAborted in place of going on for long."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S if self.aborted else None) as self._search:
                yield
        except TimeoutError:
            if self._search is None or not self._search.expired():
                raise
            raise TurnAborted from None
        finally:
            self._search = None
