"""A connection to the feeds of a replica that can be broken: what is on its way is lost then, as over a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from serving.wire.event_feed import EventFeeds, FeedItem
from serving.wire.routing_errors import Loss, ReplicaGone


class BreakingConnection:
    """`opened` has what each stream was opened behind. While `refusal` is set none can be opened."""

    def __init__(self, feeds: EventFeeds | None = None) -> None:
        self.feeds = feeds or EventFeeds(sign_of_life_s=30.0)
        self.opened: list[int | None] = []
        self.refusal: Loss | None = None
        self._delivers = asyncio.Event()
        self._delivers.set()
        self._breaks = asyncio.Event()

    def hold(self) -> None:
        """What streams take from now on stays on its way."""
        self._delivers.clear()

    def break_off(self) -> None:
        """Ends the stream that is open; what is on its way is lost. The next one delivers at once."""
        self._breaks.set()
        self._breaks = asyncio.Event()
        self._delivers.set()

    async def open_stream(
        self, replica_id: str, feed_id: str, taken: int | None
    ) -> AsyncGenerator[FeedItem, None]:
        self.opened.append(taken)
        if self.refusal is not None:
            raise ReplicaGone(replica_id, self.refusal)
        breaks = asyncio.create_task(self._breaks.wait())
        on_its_way: asyncio.Queue[FeedItem | None] = asyncio.Queue()
        sending = asyncio.create_task(self._send(feed_id, taken, on_its_way))
        try:
            while True:
                arriving = asyncio.create_task(self._arrive(on_its_way))
                await asyncio.wait((arriving, breaks), return_when=asyncio.FIRST_COMPLETED)
                if breaks.done():
                    arriving.cancel()
                    raise ReplicaGone(replica_id)
                if (item := arriving.result()) is None:
                    return
                yield item
        finally:
            breaks.cancel()
            sending.cancel()
            await asyncio.wait([sending])

    async def _send(
        self, feed_id: str, taken: int | None, on_its_way: asyncio.Queue[FeedItem | None]
    ) -> None:
        async for item in self.feeds.stream(feed_id, taken):
            on_its_way.put_nowait(item)
        on_its_way.put_nowait(None)

    async def _arrive(self, on_its_way: asyncio.Queue[FeedItem | None]) -> FeedItem | None:
        await self._delivers.wait()
        item = await on_its_way.get()
        await self._delivers.wait()
        return item
