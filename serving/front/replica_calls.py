"""Calls from an ingress to engine replicas: turns, pinned calls, broadcasts. Every wait is bounded.

The only place that knows Ray Serve's handles and their exceptions. A replica that cannot be reached, before or
during a call, is `ReplicaGone`; whether anything was delivered is for the caller to know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from contextvars import Context
from typing import Any

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import ActorDiedError, RayActorError, TaskCancelledError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from serving.wire.event_feed import FeedItem
from serving.wire.feed_reader import FeedReaders, FeedTimes, TurnNews
from serving.wire.routing_errors import ALL_REPLICAS, KnownReplicas, Loss, Members, ReplicaGone
from serving.wire.turns import ErrorInfo, ServiceError, TurnCall, TurnEvent, TurnReply

logger = logging.getLogger(__name__)

ANY_REPLICA = ""
CANCEL_TIMEOUT_S = 1.0
ROUTER_TIMEOUT_S = 3.0
TOO_LARGE = ErrorInfo(
    413,
    "request_too_large",
    "The request is larger than a replica takes in one message (RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH).",
)
LOST = (RayActorError, TaskCancelledError, RequestCancelledError, DeploymentUnavailableError)
LOST_CODES = frozenset(
    {StatusCode.CANCELLED, StatusCode.UNAVAILABLE, StatusCode.ABORTED, StatusCode.DEADLINE_EXCEEDED}
)
"""What gRPC says of a server that stops, or has gone. Serve makes its own errors of some of them, some of the time."""


class ReplicaCalls:
    """`on_broken_feed` is called each time a feed breaks that is to be opened again."""

    def __init__(
        self,
        handle: DeploymentHandle,
        *,
        feed_times: FeedTimes,
        call_timeout_s: float,
        on_broken_feed: Callable[[], None] = lambda: None,
    ) -> None:
        # By value over gRPC: measured faster than object references.
        self._unary = handle.options(_by_reference=False)
        self._turn = handle.options(method_name="turn", _by_reference=False)
        self._feed = handle.options(
            stream=True, method_name="feed", _by_reference=False, response_serialization="pickle"
        )
        self._readers = FeedReaders(self._open_feed, feed_times, on_broken_feed)
        self._call_timeout_s = call_timeout_s

    @asynccontextmanager
    async def turn(
        self, replica_id: str, call: TurnCall, epoch: int | None
    ) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        """A turn on `replica_id` (ANY_REPLICA: the less loaded of two). Leaving the context early cancels it there."""
        if replica_id == ANY_REPLICA:
            replica_id = await self.call(ANY_REPLICA, "name")
        with self._readers.listen(replica_id) as news:
            response = _detached(self._turn.options(session_id=replica_id).remote, call, epoch, news.line)
            ending = asyncio.create_task(hand_over(news, response, replica_id))
            try:
                async with aclosing(news.events()) as events:
                    yield events
            finally:
                if not ending.done():
                    _cancel(response)
                    await asyncio.wait([ending], timeout=CANCEL_TIMEOUT_S)
                    ending.cancel()

    async def stop(self) -> None:
        """Ends the feeds."""
        await self._readers.stop()

    async def call(self, replica_id: str, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """One pinned call. Raises ReplicaGone if the replica does not answer in time (None: as set for all calls)."""
        response = _detached(self._unary.options(session_id=replica_id, method_name=method).remote, *args)
        try:
            with failures_typed(replica_id):
                async with asyncio.timeout(self._call_timeout_s if timeout_s is None else timeout_s):
                    return await response
        except TimeoutError as error:
            _cancel(response)
            raise ReplicaGone(replica_id) from error
        except BaseException:
            _cancel(response)
            raise

    async def members(self) -> Members | None:
        """The replicas as Serve's router, which is here, knows them. None: it knows nobody, and waits for one."""
        try:
            await self.call(ALL_REPLICAS, "name", timeout_s=ROUTER_TIMEOUT_S)
        except KnownReplicas as answer:
            return answer.members
        except ReplicaGone:
            return None
        raise AssertionError("a call to ask who is there was delivered")

    async def present(self) -> tuple[str, ...]:
        """The replicas that may answer, those that are about to stop among them."""
        members = await self.members()
        return () if members is None else members.present

    def lose(self, replica_id: str) -> None:
        """Ends the wait of every turn for a replica that is known to be gone: it may fall silent without breaking
        off."""
        self._readers.lose(replica_id)

    async def broadcast(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """The answers of all replicas that answer in time, in the order of `present`. Serve's own broadcast gives none
        if one is missing."""
        names = await self.present()
        calls = (self.call(name, method, *args, timeout_s=timeout_s) for name in names)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException):
                logger.warning("replica %s did not answer %s: %r", name, method, answer)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def any_answers(self, timeout_s: float) -> bool:
        """Whether one replica does, whatever the others do."""
        names = await self.present()
        calls = [asyncio.create_task(self.call(name, "name", timeout_s=timeout_s)) for name in names]
        try:
            for answer in asyncio.as_completed(calls):
                with suppress(ReplicaGone):
                    await answer
                    return True
            return False
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _open_feed(
        self, replica_id: str, feed_id: str, taken: int | None
    ) -> AsyncGenerator[FeedItem, None]:
        # A replica of the version before takes no number: it cannot go on behind one.
        behind = () if taken is None else (taken,)
        response = self._feed.options(session_id=replica_id).remote(feed_id, *behind)
        try:
            with failures_typed(replica_id):
                async for batch in response:
                    yield batch
        except AioRpcError as error:  # of whatever code: a connection that breaks may have any
            raise ReplicaGone(replica_id) from error
        finally:
            _cancel(response)


@contextmanager
def failures_typed(replica_id: str) -> Iterator[None]:
    """Around a wait for a replica. Raises ReplicaGone for a lost one and ServiceError for a message that is too large
    for it; any other error stays what it is."""
    try:
        yield
    except ActorDiedError as error:
        raise ReplicaGone(replica_id, Loss.DIED) from error
    except LOST as error:
        raise ReplicaGone(replica_id) from error
    except AioRpcError as error:
        if error.code() in LOST_CODES:
            raise ReplicaGone(replica_id) from error
        if error.code() is StatusCode.RESOURCE_EXHAUSTED:
            raise ServiceError(TOO_LARGE) from error
        raise


async def hand_over(news: TurnNews, response: Awaitable[TurnReply], replica_id: str) -> None:
    """How the turn ended, however long it takes: the feed tells whether the replica lives."""
    try:
        with failures_typed(replica_id):
            news.end(await response)
    except asyncio.CancelledError:
        news.fail(ReplicaGone(replica_id))
        raise
    except Exception as error:
        news.fail(error)


def _detached(remote: Callable[..., Any], *args: Any) -> Any:
    """Calls in a context of its own. Serve cancels the calls of a request whose client leaves, before this end knows
    why: it would take the replica for lost, and move its sessions. Whoever makes a call cancels it."""
    return Context().run(remote, *args)


def _cancel(response: Any) -> None:
    """Does nothing to a call that has ended. Serve's `cancel` raises what it ended with, if it failed."""
    with suppress(Exception):
        response.cancel()
