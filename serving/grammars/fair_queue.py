"""A queue for something that does one thing at a time. Tenants take turns, however much each of them asks for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.api import EngineOverloaded


class FairQueue:
    """Used on one event loop at a time. Bounded: `most` may wait, of which `most_of_tenant` from one tenant.

    Invariant: if nobody has the place, nobody waits for it.
    """

    def __init__(self, what: str, *, most: int, most_of_tenant: int) -> None:
        self._what = what
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """For each tenant, first come first; the tenant whose turn is next comes first."""

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Holds the place inside the block. Raises EngineOverloaded if too many wait."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def _wait(self, tenant: str) -> None:
        queue = self._waiting.get(tenant, ())
        if len(queue) >= self._most_of_tenant or self.num_waiting >= self._most:
            raise EngineOverloaded(f"too many {self._what} wait; try again later")
        called = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(called)
        try:
            await called
        except asyncio.CancelledError:
            if called.cancelled():
                self._leave(tenant, called)
            else:  # it had been called already
                self._pass_on()
            raise

    def _leave(self, tenant: str, called: asyncio.Future[None]) -> None:
        queue = self._waiting.get(tenant, deque())
        if called in queue:
            queue.remove(called)
            if not queue:
                del self._waiting[tenant]

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            called = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not called.done():  # else the waiter is leaving
                called.set_result(None)
                return
        self._taken = False
