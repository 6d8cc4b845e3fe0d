"""News of turns on their way out of a replica: one stream for each ingress, whatever number of turns it has here.

A remote message for every token of every turn would cost more than the model does. So what an engine step brings to all
turns of one ingress leaves in one batch, and what is late is joined to what comes after it.

The stream is only the fast way. What it has not taken when a turn ends goes with the turn's own reply, so that neither
a stream that opens late nor one that ends early loses or reorders anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from serving.replay import merge_events
from serving.turns import FeedLine, TurnEvent, TurnReply

FeedBatch = dict[int, TurnEvent]
"""By number of the turn; an empty batch is a sign of life."""

SIGN_OF_LIFE_S = 2.0


class ToldTurn:
    """One turn's end of a feed. `told` counts what the stream has taken."""

    def __init__(self, feed: EventFeed) -> None:
        self._feed = feed
        self.told = 0
        self.waiting: TurnEvent | None = None

    def put(self, event: TurnEvent) -> None:
        """News for the next batch, joined to those that still wait for it."""
        self.waiting = event if self.waiting is None else merge_events([self.waiting], event)
        self._feed.arrived.set()

    def reply(self, last: TurnEvent) -> TurnReply:
        """Ends the turn with `last`, and with what the stream has not taken yet."""
        rest, self.waiting = self.waiting, None
        return TurnReply(self.told, (last,) if rest is None else (rest, last))


class EventFeed:
    """The turns in flight of one ingress, and its stream if it is open."""

    def __init__(self) -> None:
        self.turns: dict[int, ToldTurn] = {}
        self.arrived = asyncio.Event()
        self.streaming = False

    async def take(self, timeout_s: float) -> FeedBatch:
        """What waits, or comes first; empty if nothing came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (batch := self._collect()):
                    self.arrived.clear()
                    await self.arrived.wait()
        except TimeoutError:
            return {}
        return batch

    def _collect(self) -> FeedBatch:
        batch: FeedBatch = {}
        for number, turn in self.turns.items():
            if turn.waiting is not None:
                batch[number], turn.waiting = turn.waiting, None
                turn.told += 1
        return batch


class EventFeeds:
    """By feed id. A feed lives while it has turns or a stream. Used on the replica's event loop only."""

    def __init__(self, sign_of_life_s: float = SIGN_OF_LIFE_S) -> None:
        self._sign_of_life_s = sign_of_life_s
        self._feeds: dict[str, EventFeed] = {}

    @contextmanager
    def line(self, line: FeedLine) -> Iterator[ToldTurn]:
        """A turn's place in its feed, for as long as the turn runs."""
        feed = self._feeds.setdefault(line.feed_id, EventFeed())
        turn = feed.turns[line.number] = ToldTurn(feed)
        try:
            yield turn
        finally:
            del feed.turns[line.number]
            self._forget(line.feed_id, feed)

    async def stream(self, feed_id: str) -> AsyncGenerator[FeedBatch, None]:
        """Batches, until there has been no turn for a while: an open stream would hold up the replica's shutdown."""
        feed = self._feeds.setdefault(feed_id, EventFeed())
        feed.streaming = True
        try:
            while (batch := await feed.take(self._sign_of_life_s)) or feed.turns:
                yield batch
        finally:
            feed.streaming = False
            self._forget(feed_id, feed)

    def __len__(self) -> int:
        return len(self._feeds)

    def _forget(self, feed_id: str, feed: EventFeed) -> None:
        if not feed.turns and not feed.streaming and self._feeds.get(feed_id) is feed:
            del self._feeds[feed_id]
