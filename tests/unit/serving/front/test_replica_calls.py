"""However a replica's call ends, the turn that waits for it hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import RequestCancelledError

from serving.front.replica_calls import TOO_LARGE, ReplicaCalls, hand_over
from serving.wire.feed_reader import FeedTimes, TurnNews
from serving.wire.routing_errors import ReplicaGone
from serving.wire.turns import FeedLine, ServiceError, TurnEvent, TurnFinish, TurnReply

MOST_BYTES = 1000
LAST = TurnEvent(finish=TurnFinish("stop"))


def rpc_error(code: StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata())


class StoppingReplica:
    """A gRPC server as a replica has one, whose calls do not end; and a handle that calls it without Ray's wrapping of
    gRPC's errors, which Ray leaves out on some of its ways."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        methods = {
            "unary": grpc.unary_unary_rpc_method_handler(self._answer),
            "stream": grpc.unary_stream_rpc_method_handler(self._stream),
        }
        self.server = grpc.aio.server(options=[("grpc.max_receive_message_length", MOST_BYTES)])
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Replica", methods)])
        self.channel: grpc.aio.Channel
        self.request = b""
        self._streams = False

    async def _answer(self, _request: bytes, _context: Any) -> bytes:
        self.called.set()
        return await asyncio.get_running_loop().create_future()

    async def _stream(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        yield b"batch"
        self.called.set()
        await asyncio.get_running_loop().create_future()

    def options(self, **options: Any) -> StoppingReplica:
        same = object.__new__(StoppingReplica)
        same.__dict__ = self.__dict__ | {"_streams": options.get("stream", self._streams)}
        return same

    def remote(self, *_args: Any) -> Any:
        if self._streams:
            return self.channel.unary_stream("/Replica/stream")(self.request)
        return self.channel.unary_unary("/Replica/unary")(self.request)


@asynccontextmanager
async def stopping_replica() -> AsyncIterator[StoppingReplica]:
    replica = StoppingReplica()
    port = replica.server.add_insecure_port("127.0.0.1:0")
    await replica.server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        replica.channel = channel
        try:
            yield replica
        finally:
            await replica.server.stop(None)


async def ended_by(outcome: Any) -> list[TurnEvent]:
    async def call() -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    news = TurnNews(FeedLine("f", 0), "r", 5.0)
    await asyncio.wait([asyncio.create_task(hand_over(news, call(), "r"))])
    async with asyncio.timeout(5):
        return [event async for event in news.events()]


async def test_with_a_reply() -> None:
    assert await ended_by(TurnReply(0, (LAST,))) == [LAST]


@pytest.mark.parametrize(
    "error",
    [
        ActorUnavailableError("gone", b"1" * 16),
        RequestCancelledError("r"),
        asyncio.CancelledError(),
        rpc_error(StatusCode.CANCELLED),
        rpc_error(StatusCode.UNAVAILABLE),
        rpc_error(StatusCode.ABORTED),
        rpc_error(StatusCode.DEADLINE_EXCEEDED),
    ],
    ids=repr,
)
async def test_with_a_lost_replica(error: BaseException) -> None:
    with pytest.raises(ReplicaGone):
        await ended_by(error)


async def test_with_a_request_too_large_to_be_sent() -> None:
    with pytest.raises(ServiceError) as caught:
        await ended_by(rpc_error(StatusCode.RESOURCE_EXHAUSTED))
    assert caught.value.info == TOO_LARGE


@pytest.mark.parametrize("error", [RuntimeError("broken"), rpc_error(StatusCode.INTERNAL)], ids=repr)
async def test_with_anything_else(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        await ended_by(error)
    assert caught.value is error


def calls_of(replica: StoppingReplica) -> ReplicaCalls:
    return ReplicaCalls(replica, feed_times=FeedTimes(60.0, 0.5), call_timeout_s=60.0)  # type: ignore[arg-type]


async def test_a_server_that_stops_during_a_turn_is_a_lost_replica() -> None:
    news = TurnNews(FeedLine("f", 0), "r", 5.0)
    async with stopping_replica() as replica, asyncio.timeout(20):
        handed = asyncio.create_task(hand_over(news, replica.remote(), "r"))
        await replica.called.wait()
        await replica.server.stop(None)
        await handed
        with pytest.raises(ReplicaGone):
            await anext(news.events())


async def test_a_server_that_stops_during_a_call_is_a_lost_replica() -> None:
    async with stopping_replica() as replica, asyncio.timeout(20):
        call = asyncio.create_task(calls_of(replica).call("r", "audit"))
        await replica.called.wait()
        await replica.server.stop(None)
        with pytest.raises(ReplicaGone):
            await call


async def test_a_server_that_has_stopped_is_a_lost_replica() -> None:
    async with stopping_replica() as replica, asyncio.timeout(20):
        await replica.server.stop(None)
        with pytest.raises(ReplicaGone):
            await calls_of(replica).call("r", "audit")


async def test_a_server_that_stops_during_a_feed_is_a_lost_replica() -> None:
    async with (
        stopping_replica() as replica,
        asyncio.timeout(20),
        aclosing(calls_of(replica)._open_feed("r", "f", None)) as feed,
    ):
        assert await anext(feed) == b"batch"
        await replica.called.wait()
        await replica.server.stop(None)
        with pytest.raises(ReplicaGone):
            await anext(feed)


async def test_a_call_that_is_too_large_says_so() -> None:
    async with stopping_replica() as replica, asyncio.timeout(20):
        replica.request = b"x" * (MOST_BYTES + 1)
        with pytest.raises(ServiceError) as caught:
            await calls_of(replica).call("r", "fork_session")
    assert caught.value.info == TOO_LARGE
