"""One end of an ordered run of messages, over connections that break. Pure logic: no sockets and no clock.

Each end numbers its messages and keeps them until the other end has them. What a broken connection has lost shows as a
gap in the numbers, or in what the other end says of itself, and is sent again. So each message arrives once and in
order, or the channel as a whole is lost. (TCP's way, one floor up, where a connection may be another one.)
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum

Transmit = Callable[[bytes, bytes], None]
"""Hands a frame, header and body, to the connection there is now. It may be lost; frames do not overtake each other."""

ACKNOWLEDGE_EVERY = 16
"""So many messages may arrive before the other end is told at the latest, if nothing is sent there meanwhile."""

_HEADER = struct.Struct("<BQQQ")


class FrameKind(IntEnum):
    """What a header's first number is. MESSAGE: the message's own. STATE: how many were sent. RESEND: the same, and
    what this end has not received is to be sent again. LOST: none; the sender knows nothing of this channel.

    The other two are how many messages the sender has received, and how many of its own it keeps no more.
    """

    MESSAGE = 0
    STATE = 1
    RESEND = 2
    LOST = 3


class ChannelLost(Exception):
    """The two ends can no longer know what the other one has."""


class Channel:
    """Messages to and from one peer.

    Invariant: of `sent` messages the peer has all but those kept, which are the last ones; of the peer's this end has
    given its owner the first `received`, in order.
    """

    def __init__(self, transmit: Transmit) -> None:
        self._transmit = transmit
        self._kept: deque[bytes] = deque()
        self._sent = 0
        self._received = 0
        self._told = 0
        """`received` as this end last said it."""
        self._asked_at = -1
        """`received` when it last asked because of a gap."""
        self.unread_bytes = 0
        """Of the messages kept: what the peer has, and has not said so, among them."""

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
        """A frame has come. Returns the message that is next for the owner, if it is one. Raises ChannelLost."""
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
        if number > self._received:  # what was sent before this frame would be here
            self.resume()
        return None

    def resume(self) -> None:
        """Says what this end has, and asks for all else: the connection is a new one, or has lost something."""
        self._frame(FrameKind.RESEND, self._sent)

    def state(self) -> None:
        """Says what this end has: a sign of life."""
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
        for number, body in enumerate(self._kept, self._dropped):
            self._frame(FrameKind.MESSAGE, number, body)

    def _frame(self, kind: FrameKind, number: int, body: bytes = b"") -> None:
        self._told = self._received
        self._transmit(_HEADER.pack(kind, number, self._received, self._dropped), body)


def lost_header() -> bytes:
    """Of the frame that answers a peer whose channel is not known."""
    return _HEADER.pack(FrameKind.LOST, 0, 0, 0)


def begins(header: bytes) -> bool:
    """Whether a frame may be the first that is seen of its channel: nothing was taken at either end."""
    return len(header) == _HEADER.size and _HEADER.unpack(header)[2:] == (0, 0)
