"""Links between ranks: messages arrive whole, sends are bounded, a closed end is noticed, and strangers are refused."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest

from engine.parallel.link import Link, receive_hello, say_hello
from tests.unit.engine.parallel.thread_follower import WAIT_S, linked_pair

TOKENS = [bytes([rank]) * 32 for rank in range(3)]


def test_messages_arrive_whole_and_in_order() -> None:
    near, far = linked_pair()
    messages = [os.urandom(size) for size in (0, 1, 7, 3_000_000, 5, 70_000)]
    sender = threading.Thread(target=lambda: [near.send(message) for message in messages])
    sender.start()
    assert [far.receive() for _ in messages] == messages
    sender.join()
    assert not far.poll(0.0)
    near.send(b"more")
    assert far.poll(1.0)
    near.close()
    assert far.receive() == b"more"
    assert far.poll(1.0)
    assert far.receive() is None
    far.close()


def test_a_send_that_nobody_takes_in_fails_in_time() -> None:
    near, far = linked_pair(send_timeout_s=0.3)
    begun_s = time.monotonic()
    with pytest.raises(OSError):  # noqa: PT011 - the system chooses which one
        near.send(bytes(64 * 2**20))
    assert time.monotonic() - begun_s < WAIT_S
    near.close()
    far.close()


def test_an_end_is_noticed_with_messages_unread() -> None:
    near, far = linked_pair()
    gone = threading.Event()
    threading.Thread(target=lambda: (far.wait_gone(), gone.set()), daemon=True).start()
    near.send(b"unread")
    assert not gone.wait(0.1)
    near.close()
    assert gone.wait(WAIT_S)
    far.close()


@pytest.mark.parametrize(
    ("said", "rank"),
    [
        ((TOKENS[1], 1), 1),
        ((TOKENS[2], 2), 2),
        ((TOKENS[1], 2), None),
        ((TOKENS[0], 0), None),
        ((TOKENS[1], 7), None),
        (b"GET / HTTP/1.1\r\nHost: somebody.example.org\r\nAccept: */*\r\n\r\n", None),
        (struct.pack("<Q", 2**60), None),
        (b"", None),
    ],
)
def test_only_ranks_with_their_own_token_are_let_in(
    said: tuple[bytes, int] | bytes, rank: int | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        connected, _ = server.accept()
    if isinstance(said, bytes):
        client.sendall(said)
    else:
        say_hello(Link(client, 1.0), *said)
    assert receive_hello(connected, TOKENS, 0.2) == rank
    client.close()
    connected.close()
