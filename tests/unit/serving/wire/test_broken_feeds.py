"""A feed that breaks is opened again behind what was taken; its turns hear each event once, in order, and stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack
from random import Random

import pytest

from serving.wire import event_feed
from serving.wire.event_feed import EventFeeds, FeedItem, ToldTurn
from serving.wire.feed_reader import FeedReaders, FeedTimes, TurnNews
from serving.wire.routing_errors import Loss, ReplicaGone
from serving.wire.turns import TurnEvent, TurnFinish
from tests.unit.serving.wire.breaking_connection import BreakingConnection

LAST = TurnEvent(text=".", finish=TurnFinish("stop"))
TIMES = FeedTimes(silence_s=10.0, reopen_s=1.0)
SOON = FeedTimes(silence_s=10.0, reopen_s=0.3)


def token(number: int) -> TurnEvent:
    return TurnEvent(text=f"<{number}>", token_ids=(number,))


@pytest.fixture
async def connection() -> BreakingConnection:
    return BreakingConnection()


@pytest.fixture
async def readers(connection: BreakingConnection) -> AsyncIterator[FeedReaders]:
    readers = FeedReaders(connection.open_stream, TIMES)
    yield readers
    await readers.stop()


async def first_of(news: TurnNews) -> TurnEvent:
    async with asyncio.timeout(5):
        return await anext(news.events())


async def all_of(news: TurnNews) -> list[TurnEvent]:
    async with asyncio.timeout(5):
        return [event async for event in news.events()]


def tokens_of(events: list[TurnEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def lost_on_its_way(connection: BreakingConnection, told: ToldTurn, *numbers: int) -> None:
    """Tells these tokens, each in a batch of its own, and breaks the stream that has taken them."""
    connection.hold()
    for number in numbers:
        before = told.told
        told.put(token(number))
        async with asyncio.timeout(5):
            while told.told == before:
                await asyncio.sleep(0)
    connection.break_off()


async def test_what_was_on_its_way_is_told_by_the_next_stream(
    connection: BreakingConnection, readers: FeedReaders
) -> None:
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        assert await first_of(news) == token(1)
        await lost_on_its_way(connection, told, 2, 3)
        told.put(token(4))
        news.end(await told.reply(LAST))
        events = await all_of(news)
    assert tokens_of(events) == [2, 3, 4]
    assert events[-1] == LAST
    assert connection.opened == [None, 1]


async def test_a_stream_that_breaks_before_it_brings_anything(
    connection: BreakingConnection, readers: FeedReaders
) -> None:
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        await lost_on_its_way(connection, told, 1)
        assert await first_of(news) == token(1)
    assert connection.opened == [None, 0]


async def test_all_turns_of_the_feed_go_on(connection: BreakingConnection, readers: FeedReaders) -> None:
    with ExitStack() as stack:
        turns = []
        for number in range(8):
            news = stack.enter_context(readers.listen("r"))
            told = stack.enter_context(connection.feeds.line(news.line))
            told.put(token(number))
            turns.append((number, news, told))
        for number, news, _ in turns:
            assert await first_of(news) == token(number)
        await lost_on_its_way(connection, turns[3][2], 33)
        for number, news, told in turns:
            told.put(token(100 + number))
            news.end(await told.reply(LAST))
            heard = tokens_of(await all_of(news))
            assert heard == ([33] if number == 3 else []) + [100 + number]


async def test_news_of_a_turn_that_ends_while_the_feed_is_broken(
    connection: BreakingConnection, readers: FeedReaders
) -> None:
    """The reply goes another way, and says how many events went ahead of it."""
    with readers.listen("r") as news:
        with connection.feeds.line(news.line) as told:
            await lost_on_its_way(connection, told, 1, 2)
            news.end(await told.reply(LAST))
        assert tokens_of(await all_of(news)) == [1, 2]


@pytest.mark.parametrize("seed", range(20))
async def test_streams_that_break_all_the_time(
    seed: int, connection: BreakingConnection, readers: FeedReaders
) -> None:
    random = Random(seed)
    heard: list[list[TurnEvent]] = []

    async def turn(count: int) -> None:
        with readers.listen("r") as news:
            reading = asyncio.create_task(all_of(news))
            with connection.feeds.line(news.line) as told:
                for number in range(count):
                    told.put(token(number))
                    for _ in range(random.randrange(6)):
                        await asyncio.sleep(0)
                news.end(await told.reply(LAST))
            heard.append(await reading)

    async def trouble() -> None:
        while True:
            for _ in range(random.randrange(40)):
                await asyncio.sleep(0)
            random.choice((connection.hold, connection.break_off))()
            await asyncio.sleep(random.choice((0, 0, 0.001)))
            connection.break_off()
            await asyncio.sleep(0.03)

    breaking = asyncio.create_task(trouble())
    await asyncio.gather(*(turn(random.randrange(1, 60)) for _ in range(5)))
    breaking.cancel()
    assert len(heard) == 5
    for events in heard:
        assert tokens_of(events) == list(range(len(tokens_of(events))))
        assert events[-1] == LAST
        assert "".join(event.text for event in events[:-1]) == "".join(
            f"<{number}>" for number in tokens_of(events)
        )


async def test_each_break_has_its_own_time(connection: BreakingConnection) -> None:
    """A feed that breaks again and again, but brings news in between, is none that is lost."""
    readers = FeedReaders(connection.open_stream, SOON)
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        for number in range(20):
            await lost_on_its_way(connection, told, number)
            assert await first_of(news) == token(number)
    await readers.stop()
    assert len(connection.opened) == 21


async def test_breaks_are_counted(connection: BreakingConnection) -> None:
    broken: list[None] = []
    readers = FeedReaders(connection.open_stream, TIMES, lambda: broken.append(None))
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        await lost_on_its_way(connection, told, 1)
        await first_of(news)
        await lost_on_its_way(connection, told, 2)
        await first_of(news)
    await readers.stop()
    assert len(broken) == 2


async def test_a_silent_stream_is_opened_again() -> None:
    """Its replica answers, and only the stream is stuck."""
    connection = BreakingConnection()
    readers = FeedReaders(connection.open_stream, FeedTimes(silence_s=0.05, reopen_s=1.0))
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        connection.hold()
        told.put(token(1))
        await asyncio.sleep(0.06)
        connection._delivers.set()
        assert await first_of(news) == token(1)
    await readers.stop()
    assert connection.opened[:2] == [None, 0]


async def test_a_stream_that_its_own_transport_has_cancelled_is_opened_again(
    connection: BreakingConnection,
) -> None:
    """Serve ends a call that it has cancelled itself with CancelledError."""

    async def stream(replica_id: str, feed_id: str, taken: int | None) -> AsyncGenerator[FeedItem, None]:
        try:
            async for item in connection.open_stream(replica_id, feed_id, taken):
                yield item
        except ReplicaGone:
            raise asyncio.CancelledError from None

    readers = FeedReaders(stream, TIMES)
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        await lost_on_its_way(connection, told, 1)
        assert await first_of(news) == token(1)
    await readers.stop()


async def test_tries_end_in_a_lost_replica(connection: BreakingConnection) -> None:
    readers = FeedReaders(connection.open_stream, SOON)
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        await first_of(news)
        connection.refusal = Loss.UNREACHABLE
        connection.break_off()
        with pytest.raises(ReplicaGone) as gone:
            await all_of(news)
    assert gone.value.loss is Loss.UNREACHABLE
    assert len(connection.opened) > 1
    await readers.stop()


async def test_a_try_that_hangs_ends_in_a_lost_replica(connection: BreakingConnection) -> None:
    readers = FeedReaders(connection.open_stream, SOON)
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        await first_of(news)
        connection.break_off()
        connection.hold()
        with pytest.raises(ReplicaGone):
            await all_of(news)
    await readers.stop()


async def test_streams_that_open_and_break_at_once_end_in_a_lost_replica(
    connection: BreakingConnection,
) -> None:
    async def stream(replica_id: str, feed_id: str, taken: int | None) -> AsyncGenerator[FeedItem, None]:
        yield await anext(connection.open_stream(replica_id, feed_id, taken))
        raise ReplicaGone(replica_id)

    readers = FeedReaders(stream, SOON)
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        assert await first_of(news) == token(1)
        with pytest.raises(ReplicaGone):
            await all_of(news)
    await readers.stop()


async def test_a_replica_that_died_is_not_tried_again(
    connection: BreakingConnection, readers: FeedReaders
) -> None:
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        await first_of(news)
        connection.refusal = Loss.DIED
        connection.break_off()
        with pytest.raises(ReplicaGone) as gone:
            await all_of(news)
    assert gone.value.loss is Loss.DIED
    assert connection.opened == [None, 1]


async def test_a_broken_feed_that_nobody_listens_to_is_left_alone(
    connection: BreakingConnection, readers: FeedReaders
) -> None:
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        await first_of(news)
    connection.break_off()
    await asyncio.sleep(0.1)
    assert connection.opened == [None]


async def test_another_incarnation_of_the_replica_is_a_lost_one(
    connection: BreakingConnection, readers: FeedReaders
) -> None:
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        await first_of(news)
        connection.feeds = EventFeeds(sign_of_life_s=30.0)
        connection.break_off()
        with pytest.raises(ReplicaGone):
            await all_of(news)
    assert connection.opened == [None, 1]


async def test_a_replica_of_the_version_before_is_a_lost_one(connection: BreakingConnection) -> None:
    """Its method takes no number, and says so."""

    async def stream(replica_id: str, feed_id: str, taken: int | None) -> AsyncGenerator[FeedItem, None]:
        if taken is not None:
            connection.opened.append(taken)
            raise TypeError("feed() takes 2 positional arguments but 3 were given")
        async for item in connection.open_stream(replica_id, feed_id, None):
            yield item

    readers = FeedReaders(stream, TIMES)
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(1))
        assert await first_of(news) == token(1)
        connection.break_off()
        with pytest.raises(ReplicaGone):
            await all_of(news)
    assert connection.opened == [None, 1]


async def test_batches_that_the_replica_has_dropped_are_a_lost_replica_and_no_gap(
    connection: BreakingConnection, readers: FeedReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_feed, "BATCHES_KEPT", 4)
    with readers.listen("r") as news, connection.feeds.line(news.line) as told:
        told.put(token(0))
        await first_of(news)
        await lost_on_its_way(connection, told, 1, 2, 3, 4)
        assert tokens_of([await first_of(news) for _ in range(4)]) == [1, 2, 3, 4]
        await lost_on_its_way(connection, told, 5, 6, 7, 8, 9)
        with pytest.raises(ReplicaGone):
            await all_of(news)
