"""One end of a channel: an ordered sequence of messages over connections that may break. No sockets and no clock.

Each end numbers its messages and keeps each one until the other end has it. A message that a broken connection lost
shows as a gap in the numbers, or in the counts that the other end sends, and is sent again. So each message arrives
once and in order, or the channel as a whole is lost. (TCP does the same, but within one connection.)
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum

Transmit = Callable[[bytes, bytes], None]
"""Sends a frame (header and body) over the current connection. Frames may be lost, but do not overtake each other."""

ACKNOWLEDGE_EVERY = 16
"""At most this many messages arrive before the other end is told, even if nothing else is sent to it."""

_HEADER = struct.Struct("<BQQQ")


class FrameKind(IntEnum):
    """The kind of a frame. It says what the first of the header's three numbers means.

    MESSAGE: the number of this message. STATE: how many messages the sender has sent. RESEND: the same, and the other
    end must send again what the sender has not received. LOST: nothing; the sender does not know this channel. The
    other two numbers are how many messages the sender has received, and how many of its own it no longer keeps.
    """

    MESSAGE = 0
    STATE = 1
    RESEND = 2
    LOST = 3


class ChannelLost(Exception):
    """The two ends can no longer know what the other one has."""


class Channel:
    """Messages to and from one peer.

    Invariants: of the messages sent, the peer has all except perhaps the last ones, which are kept. This end has given
    its owner the peer's first `received` messages, in order.
    """

    def __init__(self, transmit: Transmit) -> None:
        self._transmit = transmit
        self._kept: deque[bytes] = deque()
        self._sent = 0
        self._received = 0
        self._told = 0
        """`received` as this end last told it."""
        self._asked_at = -1
        """`received` when this end last asked for messages because of a gap."""
        self.unread_bytes = 0
        """Bytes of the messages kept. The peer may have some of these without having said so yet."""

    @property
    def unread(self) -> int:
        """How many messages are kept."""
        return len(self._kept)

    @property
    def _dropped(self) -> int:
        return self._sent - len(self._kept)

    def send(self, body: bytes) -> None:
        number = self._sent
        self._sent += 1
        self._kept.append(body)
        self.unread_bytes += len(body)
        self._frame(FrameKind.MESSAGE, number, body)

    def take(self, header: bytes, body: bytes) -> bytes | None:
        """Takes a frame. Returns its message if that is the next one for the owner. Raises ChannelLost."""
        try:
            kind, number, received, dropped = _HEADER.unpack(header)
        except struct.error as error:
            raise ChannelLost(f"a frame whose header has {len(header)} bytes") from error
        if kind == FrameKind.LOST:
            raise ChannelLost("the other end does not know the channel")
        if dropped > self._received:
            raise ChannelLost(
                f"the other end keeps nothing before message {dropped}; {self._received} are here"
            )
        self._acknowledged(received)
        if kind == FrameKind.MESSAGE:
            return self._message(number, body)
        if kind == FrameKind.RESEND:
            self._resend()
        if number > self._received:  # some messages sent before this frame were lost
            self.resume()
        return None

    def resume(self) -> None:
        """Tells what this end has and asks for the rest, after a new connection or a loss."""
        self._frame(FrameKind.RESEND, self._sent)

    def state(self) -> None:
        """Tells what this end has. Also a sign of life."""
        self._frame(FrameKind.STATE, self._sent)

    def _message(self, number: int, body: bytes) -> bytes | None:
        if number > self._received:
            if self._asked_at != self._received:
                self._asked_at = self._received
                self.resume()
            return None
        if number < self._received:
            return None
        self._received += 1
        if self._received - self._told >= ACKNOWLEDGE_EVERY:
            self.state()
        return body

    def _acknowledged(self, received: int) -> None:
        if not received <= self._sent:
            raise ChannelLost(f"the other end has received {received} messages of {self._sent}")
        while self._dropped < received:
            self.unread_bytes -= len(self._kept.popleft())

    def _resend(self) -> None:
        """Answers even if nothing is kept: the other end counts the connection as broken until it hears something."""
        if not self._kept:
            self.state()
        for number, body in enumerate(self._kept, self._dropped):
            self._frame(FrameKind.MESSAGE, number, body)

    def _frame(self, kind: FrameKind, number: int, body: bytes = b"") -> None:
        self._told = self._received
        self._transmit(_HEADER.pack(kind, number, self._received, self._dropped), body)


def lost_header() -> bytes:
    """The header of the answer to a peer whose channel is not known."""
    return _HEADER.pack(FrameKind.LOST, 0, 0, 0)


def begins(header: bytes) -> bool:
    """Whether a frame may be the first one of its channel: neither end has received anything yet."""
    return len(header) == _HEADER.size and _HEADER.unpack(header)[2:] == (0, 0)
