"""Calls from a front end to replicas: turns, pinned calls, broadcasts. Every wait is bounded.

If a replica cannot be reached, before or during a call, `ReplicaGone` is raised. `ReplicaLate` is raised if it can be
reached, and does not answer in time. Neither says whether anything was done: that is for the caller to find out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from functools import partial
from random import Random
from typing import Any

from controllers.errors import ControllerError
from controllers.records import ReplicaAddress
from serving.background import BackgroundTasks
from serving.front.known_places import Affinity
from serving.front.membership import Membership
from serving.front.replica_gone import Loss, ReplicaGone, ReplicaLate
from serving.front.replica_link import LinkTimes, ReplicaLink
from serving.watch.registry import Figure
from serving.wire.calls import Answer, AnyCall, Describe, UnreadableMessage, call_of, result_of
from serving.wire.connections import Connection, ConnectionEvents
from serving.wire.controller_calls import ControllerCalls
from serving.wire.turn_events import merge_events
from serving.wire.turns import TurnCall, TurnEvent

logger = logging.getLogger(__name__)

ANY_REPLICA = ""
DEATH_CHECK_S = 0.1
"""How often a replica whose connection is broken is checked: has its process ended?"""

OpenConnection = Callable[[ReplicaAddress, ConnectionEvents], Connection]
HasDied = Callable[[ReplicaAddress], Awaitable[bool]]
"""Whether the process of a replica has certainly ended."""


class ReplicaCalls:
    """Keeps one link to each replica that was called. Used on the front end's event loop only.

    `on_broken` is called each time a connection breaks while calls wait on it, `on_gone` for each replica that the
    controller no longer lists.
    """

    def __init__(
        self,
        controller: ControllerCalls,
        open_connection: OpenConnection,
        has_died: HasDied,
        tasks: BackgroundTasks,
        random: Random,
        *,
        times: LinkTimes,
        call_timeout_s: float,
        on_broken: Callable[[], None] = lambda: None,
        on_gone: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._open_connection = open_connection
        self._has_died = has_died
        self._tasks = tasks
        self._times = times
        self._call_timeout_s = call_timeout_s
        self._on_broken = on_broken
        self._on_gone = on_gone
        self._links: dict[str, ReplicaLink] = {}
        self._membership = Membership(controller, self._gone, random)

    @asynccontextmanager
    async def turn(
        self, replica_id: str, call: TurnCall, epoch: int | None
    ) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        """A turn on `replica_id` (ANY_REPLICA: the less loaded of two). Leaving the context early cancels it there."""
        link = await self._link(replica_id)
        events = TurnEvents()
        with self._membership.turn_at(link.replica_id):
            number = link.begin(call_of(call, epoch), events.deliver)
            try:
                yield events
            finally:
                link.end(number, answered=events.ended)

    async def call(self, replica_id: str, call: AnyCall, timeout_s: float | None = None) -> Any:
        """One pinned call. Raises ServiceError if the replica answers with an error. If it does not answer within
        `timeout_s` (None: the timeout of all calls), raises ReplicaLate, or ReplicaGone if nothing else is heard of it.
        """
        link: ReplicaLink | None = None
        arrived: asyncio.Future[Answer | TurnEvent | ReplicaGone] = asyncio.get_running_loop().create_future()

        def deliver(item: Answer | TurnEvent | ReplicaGone) -> None:
            if not arrived.done():
                arrived.set_result(item)

        try:
            async with asyncio.timeout(self._call_timeout_s if timeout_s is None else timeout_s):
                link = await self._link(replica_id)
                number = link.begin(call, deliver)
                try:
                    answer = await arrived
                finally:
                    link.end(number, answered=arrived.done() and not arrived.cancelled())
        except TimeoutError as error:
            if link is None or link.quiet:
                raise ReplicaGone(replica_id) from error
            logger.warning("replica %s has not answered %s in time", link.replica_id, type(call).__name__)
            raise ReplicaLate from error
        if isinstance(answer, ReplicaGone):
            raise answer
        assert isinstance(answer, Answer)
        try:
            return result_of(call, answer)
        except UnreadableMessage as error:
            logger.warning("replica %s: an answer of another version: %s", replica_id, error)
            raise ReplicaGone(replica_id) from error

    async def present(self) -> tuple[str, ...]:
        """The replicas that may answer, including those about to stop."""
        if not self._membership.present:
            with suppress(ControllerError):
                await self._membership.look()
        return self._membership.present

    async def look(self) -> None:
        """Asks the controller for the replicas. To be called every membership.LOOK_INTERVAL_S. Raises
        ControllerError."""
        await self._membership.look()

    async def learn(self) -> None:
        """Asks the controller for new replicas, beside the looks: it takes none for gone. Raises ControllerError."""
        await self._membership.learn()

    async def broadcast(self, call: AnyCall, timeout_s: float | None = None) -> list[Any]:
        """Calls all replicas; returns the answers of those that answer in time, in the order of `present`."""
        names = await self.present()
        calls = (self.call(name, call, timeout_s) for name in names)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("replica %s did not answer %s: %r", name, type(call).__name__, answer)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def any_answers(self, timeout_s: float) -> bool:
        """Whether at least one replica answers."""
        names = await self.present()
        calls = [asyncio.create_task(self.call(name, Describe(), timeout_s)) for name in names]
        try:
            for answer in asyncio.as_completed(calls):
                with suppress(ReplicaGone, ReplicaLate):
                    await answer
                    return True
            return False
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def figures(self) -> Iterator[Figure]:
        """Figures of the links, for metrics."""
        links = list(self._links.values())
        broken = sum(link.broken for link in links)
        yield Figure("kedge_links", len(links) - broken, ("up",))
        yield Figure("kedge_links", broken, ("broken",))
        yield Figure("kedge_link_calls", sum(link.calls for link in links))
        yield Figure("kedge_link_unread_bytes", sum(link.unread_bytes for link in links))

    def stop(self) -> None:
        """Ends all links: calls that still wait get ReplicaGone."""
        for name, link in list(self._links.items()):
            link.lose(ReplicaGone(name))

    async def pick(self, affinity: Affinity, refused_by: Collection[str]) -> str:
        """A replica for a call that any replica may take (see Membership.pick); ANY_REPLICA if there is none."""
        await self.present()
        return self._membership.pick(affinity, refused_by) or ANY_REPLICA

    def has_other(self, refused_by: Collection[str]) -> bool:
        """Whether another replica may take the call (see Membership.has_other)."""
        return self._membership.has_other(refused_by)

    def preferred(self, affinity: Affinity) -> str | None:
        """The replica that a new session should be at (see Membership.preferred)."""
        return self._membership.preferred(affinity)

    async def _link(self, replica_id: str) -> ReplicaLink:
        """The link to the replica, opened if there is none. Raises ReplicaGone if there is no such replica."""
        if replica_id == ANY_REPLICA:
            await self.present()
            replica_id = self._membership.pick() or ANY_REPLICA
        link = self._links.get(replica_id)
        if link is not None:
            return link
        status = await self._membership.find(replica_id)
        if status is None or status.address is None:
            raise ReplicaGone(replica_id, Loss.UNKNOWN, had_call=False)
        link = self._links.get(replica_id)  # another call may have opened it meanwhile
        if link is None:
            # In an empty context: the link outlives the call that happens to open it.
            link = self._links[replica_id] = Context().run(
                ReplicaLink,
                replica_id,
                partial(self._open_connection, status.address),
                self._times,
                on_broken=partial(self._broke, replica_id, status.address),
                on_lost=self._lost,
            )
        return link

    def _gone(self, replica_id: str) -> None:
        """The controller no longer lists the replica. Its connection may fall silent without breaking."""
        if (link := self._links.get(replica_id)) is not None:
            link.lose(ReplicaGone(replica_id))
        self._on_gone(replica_id)

    def _lost(self, link: ReplicaLink) -> None:
        if self._links.get(link.replica_id) is link:
            del self._links[link.replica_id]

    def _broke(self, replica_id: str, address: ReplicaAddress) -> None:
        self._on_broken()
        self._tasks.start(self._look_for_death(self._links[replica_id], address))

    async def _look_for_death(self, link: ReplicaLink, address: ReplicaAddress) -> None:
        """While the connection is broken, checks whether the replica's process has ended: it would not come back."""
        while link.broken and not link.lost:
            if await self._has_died(address):
                link.lose(ReplicaGone(link.replica_id, Loss.DIED))
                return
            await asyncio.sleep(DEATH_CHECK_S)


class TurnEvents:
    """Events of one turn that have arrived and were not read yet. Has one reader, which gets all unread events merged
    into one."""

    def __init__(self) -> None:
        self._unread: list[TurnEvent] = []
        self._gone: ReplicaGone | None = None
        self._arrived = asyncio.Event()
        self.ended = False
        """Whether the last event has arrived, or can no longer arrive."""

    def deliver(self, item: Answer | TurnEvent | ReplicaGone) -> None:
        if isinstance(item, ReplicaGone):
            self._gone = item
            self.ended = True
        else:
            if isinstance(item, Answer):  # the replica does not know this call
                item = TurnEvent(error=item.error)
            self._unread.append(item)
            self.ended = item.finish is not None or item.error is not None
        self._arrived.set()

    def __aiter__(self) -> AsyncIterator[TurnEvent]:
        return self

    async def __anext__(self) -> TurnEvent:
        """The next events, merged into one. Raises ReplicaGone if no more will come."""
        while not self._unread:
            if self._gone is not None:
                raise self._gone
            if self.ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        unread, self._unread = self._unread, []
        return merge_events(unread)
