"""A feed over real gRPC, as Ray Serve carries it, whose streams end in errors: the turn notices nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from ray import cloudpickle

from engine.api import SamplingParams
from serving.front.replica_calls import ReplicaCalls
from serving.wire.event_feed import EventFeeds
from serving.wire.feed_reader import FeedTimes
from serving.wire.turns import TokenPrompt, TurnCall, TurnEvent, TurnFinish

TOKENS = 40
BREAKS_AFTER = 7
CALL = TurnCall("q", TokenPrompt((1,)), SamplingParams())


class ServedFeeds:
    """A gRPC server with the turns and feeds of a replica. A stream takes BREAKS_AFTER items and loses the last."""

    def __init__(self, code: StatusCode) -> None:
        self.feeds = EventFeeds(sign_of_life_s=30.0)
        self.opened: list[tuple[Any, ...]] = []
        self._code = code
        methods = {
            "turn": grpc.unary_unary_rpc_method_handler(self._turn),
            "feed": grpc.unary_stream_rpc_method_handler(self._feed),
        }
        self.server = grpc.aio.server()
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Replica", methods)])

    async def _turn(self, request: bytes, _context: Any) -> bytes:
        _, _, line = cloudpickle.loads(request)
        with self.feeds.line(line) as told:
            for number in range(TOKENS):
                told.put(TurnEvent(token_ids=(number,)))
                while told.told <= number:  # each in a batch of its own
                    await asyncio.sleep(0.001)
            return cloudpickle.dumps(await told.reply(TurnEvent(finish=TurnFinish("stop"))))

    async def _feed(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        arguments = cloudpickle.loads(request)
        self.opened.append(arguments)
        count = 0
        async for item in self.feeds.stream(*arguments):
            count += 1
            if count == BREAKS_AFTER:
                await context.abort(self._code)
            yield cloudpickle.dumps(item)


class Handle:
    """A deployment's handle that calls over a channel."""

    def __init__(self, channel: grpc.aio.Channel, method: str = "") -> None:
        self._channel = channel
        self._method = method

    def options(self, **options: Any) -> Handle:
        return Handle(self._channel, options.get("method_name", self._method))

    def remote(self, *args: Any) -> Any:
        kind = self._channel.unary_stream if self._method == "feed" else self._channel.unary_unary
        return kind(f"/Replica/{self._method}", response_deserializer=cloudpickle.loads)(
            cloudpickle.dumps(args)
        )


@pytest.mark.parametrize(
    "code",
    [StatusCode.UNAVAILABLE, StatusCode.CANCELLED, StatusCode.INTERNAL, StatusCode.UNKNOWN],
    ids=lambda code: code.name,
)
async def test_the_turn_goes_on(code: StatusCode) -> None:
    served = ServedFeeds(code)
    port = served.server.add_insecure_port("127.0.0.1:0")
    await served.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(60):
        calls = ReplicaCalls(
            Handle(channel),  # type: ignore[arg-type]
            feed_times=FeedTimes(silence_s=60.0, reopen_s=20.0),
            call_timeout_s=60.0,
        )
        async with calls.turn("r", CALL, None) as events:
            heard = [event async for event in events]
        await calls.stop()
    await served.server.stop(None)
    assert [token for event in heard for token in event.token_ids] == list(range(TOKENS))
    assert heard[-1].finish == TurnFinish("stop")
    assert len(served.opened) > TOKENS // BREAKS_AFTER
