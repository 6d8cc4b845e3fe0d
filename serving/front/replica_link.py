"""A front end's calls to one replica, over one channel: answers and events find the call that waits for them.

The connection under the channel is opened again by itself where it breaks, and what it lost is sent again
(serving/wire/channel.py). Where that takes too long, or the replica does not know the channel any more, the replica is
lost to every call that waits. What that says of the replica is for the controller to decide.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serving.front.replica_gone import ReplicaGone
from serving.wire.calls import (
    Answer,
    AnyCall,
    Replies,
    Request,
    UnreadableMessage,
    decode_replies,
    encode_request,
)
from serving.wire.channel import Channel, ChannelLost
from serving.wire.turns import TurnEvent

logger = logging.getLogger(__name__)

Deliver = Callable[[Answer | TurnEvent | ReplicaGone], None]
"""Takes what comes of a call. A ReplicaGone is the last: nothing more will come."""

CALLS_AT_ONCE = 16
"""So many get what has come for them before others have the event loop again: one step may bring events of hundreds of
turns."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """In seconds. A link tells that it lives every `sign_of_life_s`. One that has heard nothing for `silence_s` is
    opened anew, and one that breaks may take `reopen_s` until it is heard again."""

    sign_of_life_s: float = 2.0
    silence_s: float = 20.0
    reopen_s: float = 3.0


class Connection(Protocol):
    """To one replica, opened again by itself. Frames keep their order as long as it does not break."""

    def send(self, header: bytes, body: bytes) -> None: ...

    def renew(self) -> None:
        """Opens another one in its place: this one is silent."""

    def close(self) -> None: ...


class ConnectionEvents(Protocol):
    """Who has a connection is told of it, on the event loop."""

    def frame_came(self, header: bytes, body: bytes) -> None: ...

    def connected(self) -> None: ...

    def broke(self) -> None: ...


OpenConnection = Callable[[ConnectionEvents], Connection]


class ReplicaLink:
    """Used on the front end's event loop only. `on_broken` is called each time a connection breaks under calls that
    wait; `on_lost` once, when the link is of no more use."""

    def __init__(
        self,
        replica_id: str,
        open_connection: OpenConnection,
        times: LinkTimes,
        *,
        on_broken: Callable[[], None],
        on_lost: Callable[[ReplicaLink], None],
    ) -> None:
        self.replica_id = replica_id
        self._times = times
        self._on_broken = on_broken
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._waiting: dict[int, Deliver] = {}
        self._replies: dict[int, list[Answer | TurnEvent]] = {}
        """What has come and was not handed out, by call: those whose first came first are the first."""
        self._heard_s = self._sent_s = self._loop.time()
        self._broken_s: float | None = self._loop.time()
        """Since when it is to be opened; None while it is."""
        self._lost: ReplicaGone | None = None
        self._channel = Channel(self._transmit)
        self._connection = open_connection(self)
        self._clock = self._loop.call_later(self._tick_s, self._tick)

    @property
    def lost(self) -> bool:
        return self._lost is not None

    @property
    def broken(self) -> bool:
        return self._broken_s is not None

    @property
    def calls(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def unread_bytes(self) -> int:
        """Sent, and not known to have arrived."""
        return self._channel.unread_bytes

    def begin(self, call: AnyCall, deliver: Deliver) -> int:
        """Sends a call; returns its number. Whoever begins a call ends it."""
        number = next(self._numbers)
        self._waiting[number] = deliver
        if self._lost is not None:
            self._loop.call_soon(self._deliver, number, self._lost)
        else:
            self._channel.send(encode_request(Request(number, call)))
        return number

    def end(self, number: int, *, answered: bool) -> None:
        """Nobody waits for the call any more; if it has no answer, the replica is to give it up."""
        if self._waiting.pop(number, None) is not None and not answered and self._lost is None:
            self._channel.send(encode_request(Request(number)))

    def lose(self, gone: ReplicaGone) -> None:
        """The replica is gone: whoever waits is told at once."""
        if self._lost is not None:
            return
        self._lost = gone
        self._clock.cancel()
        self._connection.close()
        for number in list(self._waiting):
            self._deliver(number, gone)
        self._on_lost(self)

    def connected(self) -> None:
        self._channel.resume()

    def broke(self) -> None:
        if self._broken_s is None:
            self._broken_s = self._loop.time()
            if self._waiting:
                logger.warning("replica %s: the connection broke; it is opened again", self.replica_id)
                self._on_broken()

    def frame_came(self, header: bytes, body: bytes) -> None:
        self._heard_s, self._broken_s = self._loop.time(), None
        try:
            message = self._channel.take(header, body)
            if message is not None:
                self._take(decode_replies(message))
        except (ChannelLost, UnreadableMessage) as error:
            logger.warning("replica %s: the link is lost: %s", self.replica_id, error)
            self.lose(ReplicaGone(self.replica_id))

    def _take(self, replies: Replies) -> None:
        """Nothing is handed out before the event loop has been free: by then all that the connection has is here, and
        a turn that several steps have told of gets their events at once."""
        if replies and not self._replies:
            self._loop.call_soon(self._hand_out)
        for number, item in replies:
            arrived = self._replies.get(number)
            if arrived is None:
                self._replies[number] = [item]
            else:
                arrived.append(item)

    def _hand_out(self) -> None:
        """To some calls, in order; to the rest once others have had the event loop."""
        for number in list(itertools.islice(self._replies, CALLS_AT_ONCE)):
            for item in self._replies.pop(number):
                self._deliver(number, item)
        if self._replies:
            self._loop.call_soon(self._hand_out)

    def _deliver(self, number: int, item: Answer | TurnEvent | ReplicaGone) -> None:
        deliver = self._waiting.get(number)
        if deliver is not None:
            deliver(item)

    def _transmit(self, header: bytes, body: bytes) -> None:
        self._sent_s = self._loop.time()
        self._connection.send(header, body)

    @property
    def _tick_s(self) -> float:
        return min(self._times.sign_of_life_s, self._times.reopen_s) / 4

    def _tick(self) -> None:
        self._clock = self._loop.call_later(self._tick_s, self._tick)
        now_s = self._loop.time()
        if self._broken_s is None and now_s - self._heard_s > self._times.silence_s:
            self.broke()
            self._connection.renew()
        if self._broken_s is not None and now_s - self._broken_s > self._times.reopen_s:
            self.lose(ReplicaGone(self.replica_id))
        elif now_s - self._sent_s >= self._times.sign_of_life_s:
            self._channel.state()
