"""A queue before something that does one thing at a time: tenants take turns, however much each of them wants."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.api import EngineOverloaded


class FairQueue:
    """Used on one event loop at a time. Bounded: `most` may wait, and of one tenant `most_of_tenant`.

    Invariant: if nobody has the place, nobody waits for it.
    """

    def __init__(self, what: str, *, most: int, most_of_tenant: int) -> None:
        self._what = what
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Of each tenant the first come first; the tenant whose turn is next first."""

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Has the place to itself inside. Raises EngineOverloaded where too many wait."""
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
            if not called.done():  # else whoever waits is leaving
                called.set_result(None)
                return
        self._taken = False
