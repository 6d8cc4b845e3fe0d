"""A ZeroMQ socket on an event loop. pyzmq's own asyncio sockets make futures and enum members for each message, which
took a front end half of its time for a token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

logger = logging.getLogger(__name__)

AT_ONCE_S = 0.002
"""For how long messages are taken, before others have their turn on the event loop."""

_READABLE = int(zmq.POLLIN)
_NOW = int(zmq.NOBLOCK)
_MORE_COMES = int(zmq.NOBLOCK | zmq.SNDMORE)
"""As integers: pyzmq's flags make an object at each use, which takes as long as a socket's own call."""

TakeFrames = Callable[[list[bytes]], None]
"""Takes the frames of a message."""


class LoopSocket:
    """Gives each message that comes to `take`, on the event loop that runs when this is made. What `take` raises is
    logged. It owns the socket, whose queues must have no limit."""

    def __init__(self, socket: zmq.Socket[bytes], take: TakeFrames) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._came)
        self._loop.call_soon(self._came)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def send(self, frames: Sequence[bytes]) -> None:
        """Raises zmq.ZMQError."""
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE_COMES)
        self._socket.send(frames[-1], _NOW)
        if self._has_message():  # the descriptor is silent about a message that a send found
            self._loop.call_soon(self._came)

    def close(self, linger_ms: int) -> None:
        """Closes the socket; messages that were sent have `linger_ms` to leave."""
        if not self.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)

    def _has_message(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & _READABLE)

    def _came(self) -> None:
        """Takes the messages that are here, for AT_ONCE_S: the descriptor tells of changes only."""
        until_s = self._loop.time() + AT_ONCE_S
        while not self.closed and self._has_message():
            if self._loop.time() > until_s:
                self._loop.call_soon(self._came)
                return
            try:
                self._take(self._socket.recv_multipart(_NOW))
            except Exception:  # it concerns one message: the others must be heard
                logger.exception("a message was not taken")
