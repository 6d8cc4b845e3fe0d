"""However a replica's call ends, the turn that waits for it hears of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import RequestCancelledError

from serving.front.replica_calls import TOO_LARGE, hand_over
from serving.wire.feed_reader import TurnNews
from serving.wire.routing_errors import ReplicaGone
from serving.wire.turns import FeedLine, ServiceError, TurnEvent, TurnFinish, TurnReply

LAST = TurnEvent(finish=TurnFinish("stop"))


def rpc_error(code: StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata())


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


async def test_with_anything_else() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        await ended_by(RuntimeError("broken"))
