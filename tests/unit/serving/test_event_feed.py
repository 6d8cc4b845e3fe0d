"""News of turns leave a replica in batches, in order, once, whether or not a stream is there to take them."""

from __future__ import annotations

import asyncio

from serving.event_feed import EventFeeds
from serving.turns import FeedLine, TurnEvent, TurnFinish

LAST = TurnEvent(completion_tokens=9, finish=TurnFinish("stop"))


def token(number: int) -> TurnEvent:
    return TurnEvent(text=f"<{number}>", token_ids=(number,), completion_tokens=number)


async def test_what_comes_together_leaves_in_one_batch() -> None:
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as first, feeds.line(FeedLine("f", 1)) as second:
        stream = feeds.stream("f")
        first.put(token(1))
        second.put(token(1))
        assert await anext(stream) == {0: token(1), 1: token(1)}
        second.put(token(2))
        assert await anext(stream) == {1: token(2)}
        assert (first.told, second.told) == (1, 2)
        await stream.aclose()


async def test_late_news_are_joined() -> None:
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as turn:
        stream = feeds.stream("f")
        turn.put(token(1))
        turn.put(token(2))
        joined = TurnEvent(text="<1><2>", token_ids=(1, 2), completion_tokens=2)
        assert await anext(stream) == {0: joined}
        assert turn.reply(LAST).told == 1
        await stream.aclose()


async def test_what_the_stream_has_not_taken_goes_with_the_reply() -> None:
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as turn:
        turn.put(token(1))
        reply = turn.reply(LAST)
        assert (reply.told, reply.events) == (0, (token(1), LAST))
        assert turn.reply(LAST).events == (LAST,)


async def test_the_feeds_of_two_ingresses_are_apart() -> None:
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as mine, feeds.line(FeedLine("g", 0)) as other:
        other.put(token(7))
        mine.put(token(1))
        stream = feeds.stream("f")
        assert await anext(stream) == {0: token(1)}
        await stream.aclose()


async def test_an_open_stream_gives_signs_of_life_while_a_turn_runs_and_then_ends() -> None:
    feeds = EventFeeds(sign_of_life_s=0.01)
    stream = feeds.stream("f")
    with feeds.line(FeedLine("f", 0)) as turn:
        assert await anext(stream) == {}
        assert await anext(stream) == {}
        turn.put(token(1))
        assert await anext(stream) == {0: token(1)}
    async with asyncio.timeout(5):
        assert [batch async for batch in stream] == []
    assert len(feeds) == 0


async def test_the_end_of_a_turn_does_not_end_the_stream_at_once() -> None:
    """Turns that follow one another share a stream, also where the last news went with the reply."""
    feeds = EventFeeds(sign_of_life_s=30.0)
    with feeds.line(FeedLine("f", 0)) as turn:
        stream = feeds.stream("f")
        turn.put(token(1))
        await anext(stream)
        turn.put(token(2))
        turn.reply(LAST)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    with feeds.line(FeedLine("f", 1)) as turn:
        turn.put(token(5))
        async with asyncio.timeout(5):
            assert await waiting == {1: token(5)}
    await stream.aclose()
    assert len(feeds) == 0


async def test_nothing_is_left_of_turns_whose_stream_never_came() -> None:
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as turn:
        turn.put(token(1))
    assert len(feeds) == 0
