"""A turn as its ingress holds it for the client: an abort finds it here, whichever replica has it, or none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.front.refusals import TOO_MANY_LOSSES
from serving.front.turn_progress import TurnProgress
from serving.logs.call_facts import CallFacts
from serving.trace.turn_traces import FrontTrace
from serving.wire.turns import ServiceError, TurnCall

ABORT_TIMEOUT_S = 2.0
"""How long an aborted turn goes on searching for a replica: the turn may have committed, and that replica tells how it
ended."""

MOST_LOSSES = 3
"""How many replicas a turn may lose and go on: with more it may be the turn that ends them."""


class TurnAborted(Exception):
    """The turn was aborted while no replica had it."""


class DispatchedTurn:
    """One turn, from the client's call to the last event. Owned by its dispatch; used on the ingress's event loop only.

    The call came at `came_s` of the event loop's time. `progress` is what the client has been sent of the turn. `trace`
    and `facts` record what happens to it. The replicas `without_adapter` have refused it for its adapter.
    """

    def __init__(self, call: TurnCall, trace: FrontTrace, facts: CallFacts) -> None:
        self.call = call
        self.came_s = asyncio.get_running_loop().time()
        self.trace = trace
        self.facts = facts
        self.progress = TurnProgress()
        self.without_adapter: set[str] = set()
        self._lost: set[str] = set()
        self.aborted = False
        self._search: asyncio.Timeout | None = None

    def abort(self) -> None:
        if self.aborted:
            return
        self.aborted = True
        if self._search is not None:
            self._search.reschedule(asyncio.get_running_loop().time() + ABORT_TIMEOUT_S)

    def lose(self, replica_id: str) -> None:
        """The replica, or its engine, ended while it had the turn. Raises ServiceError if the turn may not go on."""
        self._lost.add(replica_id)
        if len(self._lost) > MOST_LOSSES:
            raise ServiceError(TOO_MANY_LOSSES)

    @asynccontextmanager
    async def search(self) -> AsyncIterator[None]:
        """Enclose each search for a replica with it. Raises TurnAborted if an aborted turn searches for too long."""
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S if self.aborted else None) as self._search:
                yield
        except TimeoutError:
            if self._search is None or not self._search.expired():
                raise
            raise TurnAborted from None
        finally:
            self._search = None
