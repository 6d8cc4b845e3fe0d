"""An ingress gives each turn all of its news in order, from the feed and the reply, whichever comes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack
from contextvars import ContextVar

import pytest

from serving.wire.event_feed import EventFeeds, FeedItem
from serving.wire.feed_reader import TURNS_AT_ONCE, FeedReaders, FeedTimes, TurnNews
from serving.wire.routing_errors import ReplicaGone
from serving.wire.turns import FeedLine, TurnEvent, TurnFinish, TurnReply
from tests.unit.serving.wire.token_copies import copies_of_tokens

LAST = TurnEvent(text=".", completion_tokens=9, finish=TurnFinish("stop"))


def token(number: int) -> TurnEvent:
    return TurnEvent(text=f"<{number}>", token_ids=(number,), completion_tokens=number)


class Replica:
    """Feeds without Ray; `error` breaks every stream that is open, `opened` counts them."""

    def __init__(self, sign_of_life_s: float = 30.0) -> None:
        self.feeds = EventFeeds(sign_of_life_s)
        self.opened = 0
        self.broken = asyncio.Event()

    async def open_stream(
        self, replica_id: str, feed_id: str, taken: int | None
    ) -> AsyncGenerator[FeedItem, None]:
        self.opened += 1
        stream = self.feeds.stream(feed_id, taken)
        broken = asyncio.create_task(self.broken.wait())
        try:
            while True:
                batch = asyncio.ensure_future(anext(stream, None))
                await asyncio.wait((batch, broken), return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    batch.cancel()
                    raise ReplicaGone(replica_id)
                if (news := batch.result()) is None:
                    return
                yield news
        finally:
            broken.cancel()


@pytest.fixture
async def replica() -> Replica:
    return Replica()


@pytest.fixture
async def readers(replica: Replica) -> AsyncIterator[FeedReaders]:
    readers = FeedReaders(replica.open_stream, FeedTimes(5.0, 0.1))
    yield readers
    await readers.stop()


async def all_of(news: TurnNews) -> list[TurnEvent]:
    async with asyncio.timeout(5):
        return [event async for event in news.events()]


async def first_of(news: TurnNews) -> TurnEvent:
    async with asyncio.timeout(5):
        return await anext(news.events())


async def test_news_of_many_turns_are_handed_out_some_at_a_time(
    replica: Replica, readers: FeedReaders
) -> None:
    """Those of 256 turns of one request held the front end's event loop for tens of milliseconds."""
    since = most_between = 0

    async def others() -> None:
        nonlocal since
        while True:
            since = 0
            await asyncio.sleep(0)

    async def read(news: TurnNews) -> None:
        nonlocal since, most_between
        assert await first_of(news) == token(1)
        since += 1
        most_between = max(most_between, since)

    running = asyncio.create_task(others())
    with ExitStack() as lines:
        news = [lines.enter_context(readers.listen("r")) for _ in range(5 * TURNS_AT_ONCE)]
        for each in news:
            lines.enter_context(replica.feeds.line(each.line)).put(token(1))
        await asyncio.gather(*map(read, news))
    running.cancel()
    assert most_between == TURNS_AT_ONCE


async def test_news_then_the_reply(replica: Replica, readers: FeedReaders) -> None:
    with readers.listen("r") as news, replica.feeds.line(news.line) as told:
        told.put(token(1))
        assert await first_of(news) == token(1)
        told.put(token(2))
        news.end(await told.reply(LAST))
        assert await all_of(news) == [token(2), LAST]


async def test_a_reply_that_overtakes_the_feed_waits_for_it() -> None:
    news = TurnNews(FeedLine("f", 0), "r", 5.0)
    news.end(TurnReply(2, (LAST,)))
    reading = asyncio.create_task(all_of(news))
    await asyncio.sleep(0)
    news.hear(token(1))
    await asyncio.sleep(0)
    assert not reading.done()
    news.hear(token(2))
    events = await reading
    assert "".join(event.text for event in events) == "<1><2>."
    assert events[-1] == LAST


async def test_a_turn_that_is_over_before_the_stream_opens(replica: Replica, readers: FeedReaders) -> None:
    with readers.listen("r") as news, replica.feeds.line(news.line) as told:
        told.put(token(1))
        news.end(await told.reply(LAST))
        assert await all_of(news) == [token(1), LAST]


async def test_turns_of_a_replica_share_a_stream(replica: Replica, readers: FeedReaders) -> None:
    with (
        readers.listen("r") as one,
        readers.listen("r") as two,
        replica.feeds.line(one.line) as first,
        replica.feeds.line(two.line) as second,
    ):
        first.put(token(1))
        second.put(token(2))
        assert [await first_of(one), await first_of(two)] == [token(1), token(2)]
    with readers.listen("r") as three, replica.feeds.line(three.line) as third:
        third.put(token(3))
        assert await first_of(three) == token(3)
    assert replica.opened == 1


async def test_a_lost_replica_is_lost_to_every_turn(replica: Replica, readers: FeedReaders) -> None:
    with readers.listen("r") as one, readers.listen("r") as two, replica.feeds.line(one.line) as first:
        first.put(token(1))
        assert await first_of(one) == token(1)
        two.end(TurnReply(0, (LAST,)))
        replica.broken.set()
        with pytest.raises(ReplicaGone):
            await all_of(one)
        assert await all_of(two) == [LAST]  # what is there already still counts
    replica.broken.clear()
    with readers.listen("r") as three, replica.feeds.line(three.line) as third:
        third.put(token(3))
        assert await first_of(three) == token(3)


async def test_silence_is_a_lost_replica() -> None:
    async def silent(*_: object) -> AsyncGenerator[FeedItem, None]:
        yield {}
        await asyncio.Event().wait()

    readers = FeedReaders(silent, FeedTimes(0.02, 0.1))
    with readers.listen("r") as news, pytest.raises(ReplicaGone):
        await all_of(news)
    await readers.stop()


async def test_a_stream_that_ended_is_opened_again_for_the_next_turn() -> None:
    replica = Replica(sign_of_life_s=0.01)
    readers = FeedReaders(replica.open_stream, FeedTimes(5.0, 0.1))
    for number in range(3):
        with readers.listen("r") as news:
            await asyncio.sleep(0.05)  # longer than the replica keeps a stream without turns
            with replica.feeds.line(news.line) as told:
                told.put(token(number))
                assert await first_of(news) == token(number)
    await readers.stop()
    assert replica.opened >= 3


async def test_what_a_call_failed_with_is_raised_in_place_of_the_rest() -> None:
    news = TurnNews(FeedLine("f", 0), "r", 5.0)
    news.hear(token(1))
    news.fail(RuntimeError("broken"))
    assert await first_of(news) == token(1)
    with pytest.raises(RuntimeError, match="broken"):
        await all_of(news)


async def test_a_feed_belongs_to_no_request() -> None:
    """Serve cancels what a request has called when its client leaves: the feed that it opened is for the others too."""
    request = ContextVar("request", default="none")
    opened_by = []

    async def stream(*_: object) -> AsyncGenerator[FeedItem, None]:
        opened_by.append(request.get())
        yield {}
        await asyncio.Event().wait()

    readers = FeedReaders(stream, FeedTimes(5.0, 0.1))
    request.set("first")
    with readers.listen("r"):
        await asyncio.sleep(0.01)
    await readers.stop()
    assert opened_by == ["none"]


@pytest.mark.parametrize("how", ["cancelled", "stopped"])
async def test_a_feed_that_is_ended_from_outside_leaves_nobody_waiting(how: str) -> None:
    ended = asyncio.Event()

    async def stream(*_: object) -> AsyncGenerator[FeedItem, None]:
        yield {}
        await ended.wait()
        raise asyncio.CancelledError  # so Serve ends a call that it has cancelled itself

    readers = FeedReaders(stream, FeedTimes(5.0, 0.1))
    with readers.listen("r") as news:
        await asyncio.sleep(0.01)
        if how == "cancelled":
            ended.set()
        else:
            await readers.stop()
        with pytest.raises(ReplicaGone):
            await all_of(news)
    await readers.stop()


async def test_what_went_ahead_of_the_reply_is_waited_for_but_not_for_ever() -> None:
    news = TurnNews(FeedLine("f", 0), "r", 0.02)
    news.end(TurnReply(1, (LAST,)))
    with pytest.raises(ReplicaGone):
        await all_of(news)


async def test_a_reader_that_is_slow_has_each_token_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining each event to all before it as it arrives would copy 125,250 tokens here."""
    copied = copies_of_tokens(monkeypatch)
    news = TurnNews(FeedLine("f", 0), "r", 5.0)
    for number in range(500):
        news.hear(token(number))
    news.end(TurnReply(500, (LAST,)))
    first, last = [event async for event in news.events()]
    assert first.token_ids == tuple(range(500))
    assert first.text == "".join(f"<{number}>" for number in range(500))
    assert last == LAST
    assert sum(copied) == 500
