"""An ingress's end of the replicas' feeds: hands each turn its news, in order, from the feed and from the turn's reply.

One stream is read from each replica that has turns of this ingress (serving/wire/event_feed.py). A stream that breaks,
or is silent for too long, is a lost replica to every turn that listens to it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import Context

from serving.wire.event_feed import FeedBatch
from serving.wire.routing_errors import ReplicaGone
from serving.wire.turn_events import UnreadEvents
from serving.wire.turns import FeedLine, TurnEvent, TurnReply

logger = logging.getLogger(__name__)

OpenStream = Callable[[str, str], AsyncGenerator[FeedBatch, None]]
"""Opens the stream of a replica's id and a feed's id. It raises ReplicaGone where the replica is lost."""


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
    """Reads the feed of one replica while turns listen, and until the replica finds that none has come for a while."""

    def __init__(self, replica_id: str, open_stream: OpenStream, silence_timeout_s: float) -> None:
        self._replica_id = replica_id
        self._feed_id = uuid.uuid4().hex
        self._open_stream = open_stream
        self._silence_timeout_s = silence_timeout_s
        self._numbers = itertools.count()
        self._turns: dict[int, TurnNews] = {}
        # In a context of its own: Serve cancels the calls of a request whose client leaves, and this one is for all.
        self._task = asyncio.create_task(self._read(), context=Context())

    @property
    def ended(self) -> bool:
        return self._task.done()

    @contextmanager
    def listen(self) -> Iterator[TurnNews]:
        number = next(self._numbers)
        news = self._turns[number] = TurnNews(
            FeedLine(self._feed_id, number), self._replica_id, self._silence_timeout_s
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
                async with aclosing(self._open_stream(self._replica_id, self._feed_id)) as stream:
                    await self._hand_out(stream)
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

    def _fail(self, error: ReplicaGone) -> None:
        for news in self._turns.values():
            news.fail(error)

    async def _hand_out(self, stream: AsyncGenerator[FeedBatch, None]) -> None:
        while True:
            async with asyncio.timeout(self._silence_timeout_s):
                batch = await anext(stream, None)
            if batch is None:
                return
            for number, event in batch.items():
                news = self._turns.get(number)
                if news is not None:
                    news.hear(event)


class FeedReaders:
    """One reader for each replica that has turns. Used on the ingress's event loop only."""

    def __init__(self, open_stream: OpenStream, silence_timeout_s: float) -> None:
        self._open_stream = open_stream
        self._silence_timeout_s = silence_timeout_s
        self._readers: dict[str, FeedReader] = {}

    @contextmanager
    def listen(self, replica_id: str) -> Iterator[TurnNews]:
        """The news of a turn that is about to be sent to that replica."""
        reader = self._readers.get(replica_id)
        if reader is None or reader.ended:
            self._readers = {name: other for name, other in self._readers.items() if not other.ended}
            reader = FeedReader(replica_id, self._open_stream, self._silence_timeout_s)
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
