"""News of turns leave a replica in batches, in order, once, whether or not a stream is there to take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from engine.api import TokenLogprob
from serving.wire.errors import CALL_REPEATED
from serving.wire.event_feed import BATCH_WEIGHT, EVENT_WEIGHT, EventFeeds, FeedBatch
from serving.wire.turn_events import event_weight, merge_events
from serving.wire.turns import FeedLine, ServiceError, TextLogprob, TurnEvent, TurnFinish
from tests.unit.serving.wire.token_copies import copies_of_tokens

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
        assert (await turn.reply(LAST)).told == 1
        await stream.aclose()


async def test_what_the_stream_has_not_taken_goes_with_the_reply() -> None:
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as turn:
        turn.put(token(1))
        reply = await turn.reply(LAST)
        assert (reply.told, reply.events) == (0, (token(1), LAST))
        assert (await turn.reply(LAST)).events == (LAST,)


def scored(count: int) -> TurnEvent:
    return TurnEvent(input_logprobs=(TextLogprob(TokenLogprob(1, -1.0), "a"),) * count)


async def read_into(seen: list[FeedBatch], stream: AsyncGenerator[FeedBatch, None]) -> None:
    async for batch in stream:
        seen.append(batch)
        await asyncio.sleep(0)


async def test_events_too_large_for_a_message_leave_in_parts_and_hold_up_nobody() -> None:
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as large, feeds.line(FeedLine("f", 1)) as other:
        whole = scored(5 * EVENT_WEIGHT + 7)
        large.put(whole)
        other.put(token(1))
        seen: list[FeedBatch] = []
        reading = asyncio.create_task(read_into(seen, feeds.stream("f")))
        async with asyncio.timeout(5):
            reply = await large.reply(LAST)
        reading.cancel()
        assert seen[0][1] == token(1)
        assert all(sum(map(event_weight, batch.values())) <= BATCH_WEIGHT for batch in seen)
        parts = [batch[0] for batch in seen] + list(reply.events)
        assert len(seen) == reply.told
        assert all(event_weight(part) <= EVENT_WEIGHT for part in parts)
        assert merge_events(parts[:-1], parts[-1]) == replace(LAST, input_logprobs=whole.input_logprobs)


async def test_several_large_events_share_out_the_message() -> None:
    feeds = EventFeeds()
    with ExitStack() as stack:
        turns = [stack.enter_context(feeds.line(FeedLine("f", number))) for number in range(3)]
        for turn in turns:
            turn.put(scored(EVENT_WEIGHT))
        stream = feeds.stream("f")
        assert list(await anext(stream)) == [0, 1]
        assert list(await anext(stream)) == [2]
        await stream.aclose()


async def test_a_large_answer_that_is_replayed_leaves_in_parts() -> None:
    feeds = EventFeeds()
    whole = replace(LAST, logprobs=scored(3 * EVENT_WEIGHT).input_logprobs)
    with feeds.line(FeedLine("f", 0)) as turn:
        ending = asyncio.create_task(turn.reply(whole))
        stream = feeds.stream("f")
        parts = [(await anext(stream))[0]]
        reply = await ending
        assert reply.told == 1
        parts += reply.events
        assert all(event_weight(part) <= EVENT_WEIGHT for part in parts)
        assert merge_events(parts[:-1], parts[-1]) == whole
        await stream.aclose()


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
        await turn.reply(LAST)
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


@pytest.mark.parametrize("first_has_ended", [False, True])
async def test_a_line_that_is_used_again_is_refused(first_has_ended: bool) -> None:
    """Serve sends a call again when it does not know whether the first one arrived: the turn was told twice."""
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 1)), ExitStack() as first:
        told = first.enter_context(feeds.line(FeedLine("f", 0)))
        if first_has_ended:
            first.close()
        with pytest.raises(ServiceError) as refused, feeds.line(FeedLine("f", 0)):
            pass
        assert refused.value.info.code == CALL_REPEATED
        if not first_has_ended:
            told.put(token(1))
            stream = feeds.stream("f")
            async with asyncio.timeout(5):
                assert await anext(stream) == {0: token(1)}
            await stream.aclose()
    assert len(feeds) == 0


@pytest.mark.parametrize("first_is_cancelled", [False, True])
async def test_of_two_streams_of_a_feed_the_later_has_the_news(first_is_cancelled: bool) -> None:
    feeds = EventFeeds(sign_of_life_s=30.0)
    streams = [feeds.stream("f"), feeds.stream("f")]
    reading = []
    for stream in streams:
        reading.append(asyncio.ensure_future(anext(stream, None)))
        await asyncio.sleep(0)
    if first_is_cancelled:
        reading[0].cancel()
    with feeds.line(FeedLine("f", 0)) as told:
        told.put(token(1))
        async with asyncio.timeout(5):
            assert await reading[1] == {0: token(1)}
            await asyncio.wait(reading[:1])
    assert reading[0].cancelled() if first_is_cancelled else reading[0].result() is None
    await streams[1].aclose()
    assert len(feeds) == 0


async def test_a_stream_that_is_slow_has_each_token_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copies_of_tokens(monkeypatch)
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as turn:
        for number in range(500):
            turn.put(token(number))
        (event, last) = (await turn.reply(LAST)).events
    assert event.token_ids == tuple(range(500))
    assert last == LAST
    assert sum(copied) == 500
