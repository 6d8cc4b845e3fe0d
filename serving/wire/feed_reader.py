"""An ingress's end of the replicas' feeds: hands each turn its news, in order, from the feed and from the turn's reply.

One stream is read from each replica that has turns of this ingress (serving/wire/event_feed.py). A stream that breaks,
or is silent for too long, is opened again behind the batches that it brought. Where that fails for too long the replica
is lost to every turn that listens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import Context
from dataclasses import dataclass

from serving.wire.event_feed import FeedItem
from serving.wire.routing_errors import Loss, ReplicaGone
from serving.wire.turn_events import UnreadEvents
from serving.wire.turns import ErrorInfo, FeedLine, TurnEvent, TurnReply

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
"""Between two tries to open a broken stream again. They double from the first to the longest."""

TURNS_AT_ONCE = 16
"""So many hear their news before others have the event loop again: one step may bring those of hundreds of turns."""

OpenStream = Callable[[str, str, int | None], AsyncGenerator[FeedItem, None]]
"""Opens the stream of a replica's id and a feed's id, behind so many batches if another one broke (EventFeeds.stream).
It raises ReplicaGone where it breaks, or the replica is lost."""


@dataclass(frozen=True, slots=True)
class FeedTimes:
    """`silence_s`: a stream that brings nothing for so long is broken; replicas give signs of life more often.
    `reopen_s` bounds the time in which a broken stream is opened again."""

    silence_s: float
    reopen_s: float


class FeedLost(Exception):
    """The replica can no longer go on with this feed: it has dropped what was not taken, or is another incarnation."""


class TurnNews:
    """What has come of one turn and was not read yet. One reader.

    When the reply is there, what went ahead of it must come within `late_timeout_s`.
    """

    def __init__(self, line: FeedLine, replica_id: str, late_timeout_s: float) -> None:
        self.line = line
        self._replica_id = replica_id
        self._late_timeout_s = late_timeout_s
        self._unread = UnreadEvents()
        self._heard = 0
        self._reply: TurnReply | None = None
        self._failure: Exception | None = None
        self._arrived = asyncio.Event()

    def hear(self, event: TurnEvent) -> None:
        """News from the feed. If nobody has read the last ones yet, they are read together."""
        self._heard += 1
        self._unread.add(event)
        self._arrived.set()

    def end(self, reply: TurnReply) -> None:
        self._reply = reply
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        """There is nothing more to come; a reply that is there already still counts."""
        self._failure = error
        self._arrived.set()

    async def events(self) -> AsyncGenerator[TurnEvent, None]:
        """All news in order, then those of the reply. Raises what it failed with in place of what will not come."""
        while True:
            if self._unread:
                yield self._unread.take()
            elif self._reply is not None and self._heard >= self._reply.told:
                for event in self._reply.events:
                    yield event
                return
            elif self._failure is not None:
                raise self._failure
            else:
                self._arrived.clear()
                try:
                    async with asyncio.timeout(None if self._reply is None else self._late_timeout_s):
                        await self._arrived.wait()
                except TimeoutError:
                    self.fail(ReplicaGone(self._replica_id))


class FeedReader:
    """Reads the feed of one replica while turns listen, and until the replica finds that none has come for a while.

    `on_broken` is called each time a stream breaks that is to be opened again.
    """

    def __init__(
        self, replica_id: str, open_stream: OpenStream, times: FeedTimes, on_broken: Callable[[], None]
    ) -> None:
        self._replica_id = replica_id
        self._feed_id = uuid.uuid4().hex
        self._open_stream = open_stream
        self._times = times
        self._on_broken = on_broken
        self._numbers = itertools.count()
        self._turns: dict[int, TurnNews] = {}
        self._taken = 0
        """Batches of the feed so far."""
        self._opened = False
        self._reopening: _Reopening | None = None
        """Since a stream broke, until there is news from the next one."""
        # In a context of its own: Serve cancels the calls of a request whose client leaves, and this one is for all.
        self._task = asyncio.create_task(self._read(), context=Context())

    @property
    def ended(self) -> bool:
        return self._task.done()

    @contextmanager
    def listen(self) -> Iterator[TurnNews]:
        number = next(self._numbers)
        news = self._turns[number] = TurnNews(
            FeedLine(self._feed_id, number), self._replica_id, self._times.silence_s
        )
        try:
            yield news
        finally:
            del self._turns[number]

    def lose(self) -> None:
        """Everybody who listens is told at once; the stream ends when it can."""
        self._task.cancel()
        self._fail(ReplicaGone(self._replica_id))

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _read(self) -> None:
        try:
            # The first turn listens once this task has been made; a stream may end just as another turn begins.
            while True:
                try:
                    await self._read_stream()
                except ReplicaGone as error:
                    await self._pause_before_reopening(error)
                if not self._turns:
                    return
        except ReplicaGone as error:
            self._fail(error)
        except Exception as error:
            logger.warning("replica %s: the feed broke off: %r", self._replica_id, error)
            self._fail(ReplicaGone(self._replica_id))
        except asyncio.CancelledError:
            self._fail(ReplicaGone(self._replica_id))
            raise

    async def _read_stream(self) -> None:
        """One stream, to its end. Raises ReplicaGone if it breaks, FeedLost if it cannot go on where the last one
        broke."""
        try:
            behind, self._opened = self._taken if self._opened else None, True
            async with aclosing(self._open_stream(self._replica_id, self._feed_id, behind)) as stream:
                await self._hand_out(stream)
        except TimeoutError as error:
            raise ReplicaGone(self._replica_id) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # So Serve ends a call that it has cancelled itself.
            raise ReplicaGone(self._replica_id) from error

    async def _hand_out(self, stream: AsyncGenerator[FeedItem, None]) -> None:
        answered = self._reopening is None
        patience_s = self._times.silence_s if self._reopening is None else self._reopening.left_s
        while True:
            async with asyncio.timeout(patience_s):
                batch = await anext(stream, None)
            if batch is None:
                return
            if isinstance(batch, ErrorInfo):
                raise FeedLost(batch.message)
            if batch:
                self._taken += 1
            if batch or answered:  # that it is open is not enough, or it might break for ever
                self._reopening = None
            answered, patience_s = True, self._times.silence_s
            for place, (number, event) in enumerate(batch.items(), 1):
                news = self._turns.get(number)
                if news is not None:
                    news.hear(event)
                if place % TURNS_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _pause_before_reopening(self, error: ReplicaGone) -> None:
        """Raises `error` if the replica has died, or the time for tries is over."""
        if error.loss is not Loss.UNREACHABLE:
            raise error
        if self._reopening is None:
            logger.warning("replica %s: the feed broke; it is opened again", self._replica_id)
            self._reopening = _Reopening(self._times.reopen_s)
            self._on_broken()
        if not await self._reopening.pause():
            raise error

    def _fail(self, error: ReplicaGone) -> None:
        for news in self._turns.values():
            news.fail(error)


class _Reopening:
    """The tries to open one broken stream again. Used on a running event loop only."""

    def __init__(self, within_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = self._loop.time() + within_s
        self._pause_s = FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        return self._deadline_s - self._loop.time()

    async def pause(self) -> bool:
        """Before the next try. False if there is no time for one."""
        if self._pause_s > self.left_s:
            return False
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True


class FeedReaders:
    """One reader for each replica that has turns. Used on the ingress's event loop only."""

    def __init__(
        self, open_stream: OpenStream, times: FeedTimes, on_broken: Callable[[], None] = lambda: None
    ) -> None:
        self._open_stream = open_stream
        self._times = times
        self._on_broken = on_broken
        self._readers: dict[str, FeedReader] = {}

    @contextmanager
    def listen(self, replica_id: str) -> Iterator[TurnNews]:
        """The news of a turn that is about to be sent to that replica."""
        reader = self._readers.get(replica_id)
        if reader is None or reader.ended:
            self._readers = {name: other for name, other in self._readers.items() if not other.ended}
            reader = FeedReader(replica_id, self._open_stream, self._times, self._on_broken)
            self._readers[replica_id] = reader
        with reader.listen() as news:
            yield news

    def lose(self, replica_id: str) -> None:
        """Ends the stream of a replica that is gone, and the wait of its turns."""
        reader = self._readers.pop(replica_id, None)
        if reader is not None:
            reader.lose()

    async def stop(self) -> None:
        """Ends all streams. To turns that still listen their replica is lost."""
        for reader in self._readers.values():
            await reader.stop()
