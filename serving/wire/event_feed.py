"""News of turns on their way out of a replica: one stream for each ingress, whatever number of turns it has here.

A remote message for every token of every turn would cost more than the model does. So what an engine step brings to all
turns of one ingress leaves in one batch, and what is late is joined to what comes after it.

The stream is only the fast way. What it has not taken when a turn ends goes with the turn's own reply, so a stream that
opens late loses nothing. Batches are numbered from 0 by their place in the feed, and the last ones are kept: an ingress
whose stream broke opens another one behind those that it has taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress

from serving.wire.errors import CALL_REPEATED, FEED_LOST, unavailable
from serving.wire.turn_events import UnreadEvents, event_weight, split_event
from serving.wire.turns import ErrorInfo, FeedLine, ServiceError, TurnEvent, TurnReply

FeedBatch = dict[int, TurnEvent]
"""By number of the turn. An empty batch is a sign of life, and has no number in the feed."""

FeedItem = FeedBatch | ErrorInfo
"""What a stream brings. An error ends it: the batches that it was to begin with are not there."""

SIGN_OF_LIFE_S = 2.0
KEPT_S = 60.0
"""A feed without stream and turns is kept so long: its ingress may learn late that the stream broke."""
DRAIN_TIMEOUT_S = 10.0
EVENT_WEIGHT = 1024
"""Log-probabilities of one event at most, up to 0.7 MB. Messages between replicas and ingresses are limited."""

BATCH_WEIGHT = 2048
BATCHES_KEPT = 512
"""Of each feed. What a transport has taken and not delivered when it breaks is some tens of batches."""

WEIGHT_KEPT = 4 * BATCH_WEIGHT
"""Log-probabilities in the batches kept: up to 6 MB as they travel."""

LINES_KEPT = 1024
"""Numbers of turns that a feed remembers. One that is sent again comes soon after, if it comes."""

REPEATED = unavailable("the call had come before, and its answer may be on its way", CALL_REPEATED)
LOST = unavailable("the replica does not have the batches that were asked for", FEED_LOST)


class ToldTurn:
    """One turn's end of a feed. `told` counts what the stream has taken."""

    def __init__(self, feed: EventFeed) -> None:
        self._feed = feed
        self._waiting: deque[UnreadEvents] = deque()
        """What `take` is to give at a time."""
        self._taken = asyncio.Event()
        self.told = 0

    def put(self, event: TurnEvent) -> None:
        """News for the next batch, joined to those that still wait for it."""
        for piece in split_event(event, EVENT_WEIGHT):
            if self._waiting and self._waiting[-1].weight + event_weight(piece) <= EVENT_WEIGHT:
                self._waiting[-1].add(piece)
            else:
                self._waiting.append(UnreadEvents(piece))
        self._feed.arrived.set()

    @property
    def next_weight(self) -> int | None:
        """Of the event that `take` would give; None if none waits."""
        return self._waiting[0].weight if self._waiting else None

    def take(self) -> TurnEvent:
        """The first event that waits, for the stream."""
        self.told += 1
        self._taken.set()
        return self._waiting.popleft().take()

    async def reply(self, last: TurnEvent) -> TurnReply:
        """Ends the turn with `last`, and with what the stream has not taken yet: at most one event, unless no stream
        comes in time."""
        *ahead, last = split_event(last, EVENT_WEIGHT)
        for piece in ahead:
            self.put(piece)
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                while len(self._waiting) > 1:
                    self._taken.clear()
                    await self._taken.wait()
        rest = tuple(unread.take() for unread in self._waiting)
        self._waiting.clear()
        return TurnReply(self.told, (*rest, last))


class SentBatches:
    """The last batches that a feed's streams have taken, in order. Earlier ones were acknowledged, or had no room."""

    def __init__(self) -> None:
        self._kept: deque[tuple[FeedBatch, int]] = deque()  # with its weight
        self._weight = 0
        self._first = 0

    @property
    def count(self) -> int:
        """Of all batches that were ever taken."""
        return self._first + len(self._kept)

    def add(self, batch: FeedBatch, weight: int) -> None:
        self._kept.append((batch, weight))
        self._weight += weight
        while len(self._kept) > BATCHES_KEPT or self._weight > WEIGHT_KEPT:
            self._drop()

    def behind(self, taken: int) -> list[FeedBatch] | None:
        """Those behind the first `taken` of the feed, which this acknowledges. None if they are not all there."""
        if not self._first <= taken <= self.count:
            return None
        while self._first < taken:
            self._drop()
        return [batch for batch, _ in self._kept]

    def _drop(self) -> None:
        self._weight -= self._kept.popleft()[1]
        self._first += 1


class EventFeed:
    """The turns in flight of one ingress, its stream if it is open, and what its streams have taken."""

    def __init__(self) -> None:
        self.turns: dict[int, ToldTurn] = {}
        self.begun: deque[int] = deque(maxlen=LINES_KEPT)
        self.arrived = asyncio.Event()
        self.stream: object | None = None
        self.sent = SentBatches()
        self.forgetting: asyncio.TimerHandle | None = None

    @property
    def used(self) -> bool:
        return bool(self.turns) or self.stream is not None

    async def take(self, stream: object, timeout_s: float) -> FeedBatch:
        """What waits, or comes first; empty if nothing came in time, or another stream has taken over."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.stream is stream:
                    if batch := self._collect():
                        return batch
                    self.arrived.clear()
                    await self.arrived.wait()
        except TimeoutError:
            pass
        return {}

    def _collect(self) -> FeedBatch:
        """An event of each turn, but of those with log-probabilities no more than a message may hold."""
        batch: FeedBatch = {}
        room = BATCH_WEIGHT
        for number, turn in self.turns.items():
            weight = turn.next_weight
            if weight is not None and weight <= room:
                batch[number] = turn.take()
                room -= weight
        if batch:
            self.sent.add(batch, BATCH_WEIGHT - room)
        return batch


class EventFeeds:
    """By feed id. A feed lives while it has turns or a stream, and `kept_s` longer. Used on the replica's loop only.

    Serve may send a call again when it does not know whether the first one arrived. Both would tell the turn from its
    first token, on one line: the later one of a turn is refused, and who asked goes on behind what it was told. Of
    streams the later one counts.
    """

    def __init__(self, sign_of_life_s: float = SIGN_OF_LIFE_S, kept_s: float = KEPT_S) -> None:
        self._sign_of_life_s = sign_of_life_s
        self._kept_s = kept_s
        self._feeds: dict[str, EventFeed] = {}

    @contextmanager
    def line(self, line: FeedLine) -> Iterator[ToldTurn]:
        """A turn's place in its feed, for as long as the turn runs. Raises ServiceError if it was used before."""
        feed = self._feeds.setdefault(line.feed_id, EventFeed())
        if line.number in feed.begun:
            raise ServiceError(REPEATED)
        feed.begun.append(line.number)
        turn = feed.turns[line.number] = ToldTurn(feed)
        try:
            yield turn
        finally:
            del feed.turns[line.number]
            self._release(line.feed_id, feed)

    async def stream(self, feed_id: str, taken: int | None = None) -> AsyncGenerator[FeedItem, None]:
        """Batches, until there has been no turn for a while: an open stream would hold up the replica's shutdown.

        `taken`: another stream broke after so many batches. This one says at once that it is open, and goes on behind
        them; if that cannot be, it is an error alone.
        """
        feed = self._feeds.get(feed_id) or EventFeed()
        missed = feed.sent.behind(taken or 0)
        if missed is None:
            yield LOST
            return
        self._feeds[feed_id] = feed
        mine = feed.stream = object()
        feed.arrived.set()
        try:
            if taken is not None:
                yield {}
            for batch in missed:
                yield batch
            while (batch := await feed.take(mine, self._sign_of_life_s)) or (
                feed.turns and feed.stream is mine
            ):
                yield batch
        finally:
            if feed.stream is mine:
                feed.stream = None
            self._release(feed_id, feed)

    def __len__(self) -> int:
        """How many are in use."""
        return sum(feed.used for feed in self._feeds.values())

    def _release(self, feed_id: str, feed: EventFeed) -> None:
        """Forgets a feed that is not in use: at once if nothing was ever sent."""
        if feed.used:
            return
        if feed.forgetting is not None:
            feed.forgetting.cancel()
        if feed.sent.count:
            loop = asyncio.get_running_loop()
            feed.forgetting = loop.call_later(self._kept_s, self._forget, feed_id, feed)
        else:
            self._forget(feed_id, feed)

    def _forget(self, feed_id: str, feed: EventFeed) -> None:
        if not feed.used and self._feeds.get(feed_id) is feed:
            del self._feeds[feed_id]
