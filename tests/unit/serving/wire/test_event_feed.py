"""News of turns leave a replica in batches, in order, once, whether or not a stream is there to take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from engine.api import TokenLogprob
from serving.wire.errors import CALL_REPEATED, FEED_LOST
from serving.wire.event_feed import (
    BATCH_WEIGHT,
    BATCHES_KEPT,
    EVENT_WEIGHT,
    WEIGHT_KEPT,
    EventFeeds,
    FeedBatch,
    FeedItem,
)
from serving.wire.turn_events import event_weight, merge_events
from serving.wire.turns import ErrorInfo, FeedLine, ServiceError, TextLogprob, TurnEvent, TurnFinish
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


async def read_into(seen: list[FeedBatch], stream: AsyncGenerator[FeedItem, None]) -> None:
    async for batch in stream:
        assert isinstance(batch, dict)
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
        batch = await anext(stream)
        assert isinstance(batch, dict)
        parts = [batch[0]]
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


async def collected(stream: AsyncGenerator[FeedItem, None]) -> list[FeedItem]:
    async with asyncio.timeout(5):
        return [item async for item in stream]


async def test_a_stream_goes_on_behind_what_another_brought() -> None:
    feeds = EventFeeds(sign_of_life_s=0.01)
    with feeds.line(FeedLine("f", 0)) as turn:
        broken = feeds.stream("f")
        for number in range(3):
            turn.put(token(number))
            assert await anext(broken) == {0: token(number)}
        await broken.aclose()
        turn.put(token(3))
        stream = feeds.stream("f", 1)
        seen = [await anext(stream) for _ in range(4)]
        assert seen == [{}, {0: token(1)}, {0: token(2)}, {0: token(3)}]
        assert (await turn.reply(LAST)).told == 4
    assert await collected(stream) == []


async def test_a_stream_that_is_opened_again_says_so_at_once() -> None:
    feeds = EventFeeds(sign_of_life_s=30.0)
    with feeds.line(FeedLine("f", 0)):
        stream = feeds.stream("f", 0)
        async with asyncio.timeout(5):
            assert await anext(stream) == {}
        await stream.aclose()


@pytest.mark.parametrize("taken", [1, 3])
async def test_a_stream_that_cannot_go_on_is_an_error_alone(taken: int) -> None:
    """Batch 1 was acknowledged by the one before; batch 3 was never sent, so another incarnation has sent it."""
    feeds = EventFeeds()
    with feeds.line(FeedLine("f", 0)) as turn:
        stream = feeds.stream("f")
        for number in range(2):
            turn.put(token(number))
            await anext(stream)
        await stream.aclose()
        stream = feeds.stream("f", 2)
        assert await anext(stream) == {}
        await stream.aclose()
        (error,) = await collected(feeds.stream("f", taken))
        assert isinstance(error, ErrorInfo)
        assert error.code == FEED_LOST
    (error,) = await collected(feeds.stream("unknown", taken))
    assert isinstance(error, ErrorInfo)


async def test_what_is_kept_of_a_feed_is_bounded_by_number_and_by_size() -> None:
    feeds = EventFeeds(sign_of_life_s=0.01)
    with feeds.line(FeedLine("f", 0)) as turn:
        stream = feeds.stream("f")
        for number in range(BATCHES_KEPT + 5):
            turn.put(token(number))
            await anext(stream)
        await stream.aclose()
        assert feeds._feeds["f"].sent.behind(4) is None
        kept = feeds._feeds["f"].sent.behind(5)
        assert kept is not None
        assert len(kept) == BATCHES_KEPT
        sent = feeds._feeds["f"].sent.count
        stream = feeds.stream("f", sent)
        await anext(stream)
        for _ in range(10):
            turn.put(scored(EVENT_WEIGHT))
            await anext(stream)
        await stream.aclose()
        fits = WEIGHT_KEPT // EVENT_WEIGHT
        assert feeds._feeds["f"].sent.behind(sent + 10 - fits - 1) is None
        kept = feeds._feeds["f"].sent.behind(sent + 10 - fits)
        assert kept is not None
        assert len(kept) == fits


async def test_a_feed_whose_stream_broke_is_kept_for_a_while_and_then_forgotten() -> None:
    """Its turns may have ended, and what was on its way is still to be told."""
    feeds = EventFeeds(sign_of_life_s=0.01, kept_s=0.1)
    with feeds.line(FeedLine("f", 0)) as turn:
        stream = feeds.stream("f")
        turn.put(token(1))
        await anext(stream)
        await stream.aclose()
        await turn.reply(LAST)
    assert len(feeds) == 0
    assert await collected(feeds.stream("f", 0)) == [{}, {0: token(1)}]
    async with asyncio.timeout(5):
        while feeds._feeds:
            await asyncio.sleep(0.01)


async def test_a_front_end_of_the_version_before_opens_a_feed_without_a_number() -> None:
    feeds = EventFeeds(sign_of_life_s=0.01)
    with feeds.line(FeedLine("f", 0)) as turn:
        turn.put(token(1))
        stream = feeds.stream("f")
        assert await anext(stream) == {0: token(1)}
    assert await collected(stream) == []
