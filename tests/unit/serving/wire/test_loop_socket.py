"""Messages of a ZeroMQ socket on an event loop. The socket's descriptor tells of a message once, and any call of the
socket may be the one that learns of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import zmq

from serving.wire.loop_socket import AT_ONCE_S, LoopSocket

WAIT_S = 20.0

Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        here.bind("inproc://pair")
        there.connect("inproc://pair")
        yield here, there


class Taken:
    """What was taken. A message `bad` cannot be."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self._came = asyncio.Event()

    def take(self, frames: list[bytes]) -> None:
        self.messages.append(b" ".join(frames))
        self._came.set()
        if frames == [b"bad"]:
            raise ValueError("bad")

    async def until(self, *messages: bytes) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.messages != list(messages):
                self._came.clear()
                await self._came.wait()


async def test_a_message_that_came_before_is_taken(pair: Pair) -> None:
    here, there = pair
    there.send_multipart((b"two", b"frames"))
    assert here.get(zmq.EVENTS) & zmq.POLLIN  # from now on the descriptor is silent
    taken = Taken()
    socket = LoopSocket(here, taken.take)
    await taken.until(b"two frames")
    socket.close(linger_ms=0)


async def test_a_message_that_a_send_finds_is_taken(pair: Pair) -> None:
    here, there = pair
    taken = Taken()
    socket = LoopSocket(here, taken.take)
    for _ in range(3):
        await asyncio.sleep(0)  # it has looked, and the descriptor tells of nothing
    there.send(b"one")
    assert here.get(zmq.EVENTS) & zmq.POLLIN  # as the send itself sometimes does
    socket.send((b"answer",))
    await taken.until(b"one")
    assert there.recv_multipart() == [b"answer"]
    socket.close(linger_ms=0)


async def test_a_message_that_cannot_be_taken_keeps_no_other_away(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = pair
    taken = Taken()
    socket = LoopSocket(here, taken.take)
    for message in (b"one", b"bad", b"three"):
        there.send(message)
    await taken.until(b"one", b"bad", b"three")
    assert "a message was not taken" in caplog.text
    socket.close(linger_ms=0)


async def test_what_is_taken_may_close_the_socket(pair: Pair) -> None:
    here, there = pair
    closed = asyncio.Event()

    def close(_frames: list[bytes]) -> None:
        socket.close(linger_ms=0)
        closed.set()

    socket = LoopSocket(here, close)
    there.send(b"one")
    there.send(b"two")
    async with asyncio.timeout(WAIT_S):
        await closed.wait()
    assert socket.closed
    socket.close(linger_ms=0)


async def test_messages_that_take_long_leave_others_their_turn(pair: Pair) -> None:
    here, there = pair
    for _ in range(9):
        there.send(b"long")
    taken: list[bytes] = []

    def take(frames: list[bytes]) -> None:
        time.sleep(2 * AT_ONCE_S)
        taken.extend(frames)

    most, before = 0, 0
    socket = LoopSocket(here, take)
    async with asyncio.timeout(WAIT_S):
        while len(taken) < 9:
            await asyncio.sleep(0)
            most, before = max(most, len(taken) - before), len(taken)
    assert most <= 2, "the descriptor's callback and the one that was left may follow each other"
    socket.close(linger_ms=0)
