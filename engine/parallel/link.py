"""Messages between rank 0 and another rank, over a socket, each after its length.

Messages are pickled plain data. They are unpickled only from a peer that has shown its token.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

_LENGTH = struct.Struct("<Q")
_TIMEVAL = struct.Struct("ll")
_HELLO = struct.Struct("<I")
_PIECE_BYTES = 1 << 20


class Link:
    """One end of the connection. Sends from one thread at a time, receives on one thread. Raises OSError; a send that
    the peer does not read fails after `send_timeout_s`."""

    def __init__(self, connected: socket.socket, send_timeout_s: float) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds = int(send_timeout_s)
        timeout = _TIMEVAL.pack(seconds, int((send_timeout_s - seconds) * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._socket = connected
        self._received = bytearray()

    def send(self, message: bytes) -> None:
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def receive(self) -> bytes | None:
        """Waits for the next message; None if the other end is gone."""
        while (message := self._next()) is None:
            piece = self._socket.recv(_PIECE_BYTES)
            if not piece:
                return None
            self._received += piece
        return message

    def poll(self, timeout_s: float) -> bool:
        """Whether `receive` has something to return now, including that the other end is gone."""
        return bool(self._received) or bool(select.select([self._socket], [], [], timeout_s)[0])

    def wait_gone(self) -> None:
        """Waits until the other end has closed; its last messages may still be unread. Any thread."""
        gone = select.poll()
        gone.register(
            self._socket.fileno(), getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
        )
        gone.poll()

    def close(self) -> None:
        """Also wakes a thread that waits in `receive`."""
        with suppress(OSError):  # the other end was quicker
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _next(self) -> bytes | None:
        """The first whole message received."""
        start = _LENGTH.size
        if len(self._received) < start:
            return None
        end = start + int(_LENGTH.unpack_from(self._received)[0])
        if len(self._received) < end:
            return None
        message = bytes(self._received[start:end])
        del self._received[:end]
        return message


def say_hello(link: Link, token: bytes, rank: int) -> None:
    link.send(_HELLO.pack(rank) + token)


def receive_hello(connected: socket.socket, tokens: Sequence[bytes], timeout_s: float) -> int | None:
    """The rank that connected, proven by its token; None for strangers. Reads no more than a hello."""
    connected.settimeout(timeout_s)
    length = _HELLO.size + len(tokens[0])
    try:
        said = _read(connected, _LENGTH.size + length)
    except OSError:
        return None
    (claimed,), (rank,) = _LENGTH.unpack_from(said), _HELLO.unpack_from(said, _LENGTH.size)
    token = said[_LENGTH.size + _HELLO.size :]
    known = 0 < rank < len(tokens) and hmac.compare_digest(token, tokens[rank])
    return int(rank) if claimed == length and known else None


def _read(connected: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        piece = connected.recv(count - len(said))
        if not piece:
            raise ConnectionError("closed before its hello")
        said += piece
    return said
