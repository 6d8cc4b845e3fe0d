"""A front end's calls to one replica, over one channel. Answers and events are handed to the calls that wait for them.

If the connection under the channel breaks, it is reopened automatically and what it lost is sent again
(serving/wire/channel.py). If that takes too long, or the replica no longer knows the channel, the replica is lost to
every call that waits. What that means for the replica, the controller decides.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

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
from serving.wire.connections import Connection, ConnectionEvents
from serving.wire.errors import error_info
from serving.wire.turns import ServiceError, TurnEvent

logger = logging.getLogger(__name__)

Deliver = Callable[[Answer | TurnEvent | ReplicaGone], None]
"""Receives the results of a call. Nothing more comes after a ReplicaGone."""

CALLS_AT_ONCE = 16
"""How many calls get their results before the event loop is left to other tasks: one step of an engine may bring events
of hundreds of turns."""


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Times of a link, in seconds. Each end gives a sign of life every `sign_of_life_s`. If it has received nothing for
    `silence_s`, it is reopened. After a break it is lost unless something arrives within `reopen_s`."""

    sign_of_life_s: float = 2.0
    silence_s: float = 20.0
    reopen_s: float = 3.0


SIGNS_MISSED = 4
"""A replica may be gone once so many of its signs of life are missing."""


class ReplicaLink:
    """A front end's calls to one replica. `on_broken` is called each time a connection breaks while calls wait on it;
    `on_lost` once, when the link can no longer be used. Used on the front end's event loop only."""

    def __init__(
        self,
        replica_id: str,
        open_connection: Callable[[ConnectionEvents], Connection],
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
        self._unreached: set[int] = set()
        """Those of the calls that wait for which the connection has not been open yet."""
        self._replies: dict[int, list[Answer | TurnEvent]] = {}
        """What has arrived and was not handed out yet, by call, in the order in which the calls' first items arrived.
        """
        self._heard_s = self._sent_s = self._loop.time()
        self._broken_s: float | None = self._loop.time()
        """Since when the connection is not open; None while it is open."""
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
    def quiet(self) -> bool:
        """Whether the replica may be gone: the connection is not open, or signs of life are missing."""
        heard_ago_s = self._loop.time() - self._heard_s
        return self.broken or heard_ago_s > SIGNS_MISSED * self._times.sign_of_life_s

    @property
    def calls(self) -> int:
        """How many calls wait."""
        return len(self._waiting)

    @property
    def unread_bytes(self) -> int:
        """Bytes that were sent and are not known to have arrived."""
        return self._channel.unread_bytes

    def begin(self, call: AnyCall, deliver: Deliver) -> int:
        """Sends a call; returns its number. The caller must `end` the call. Raises ServiceError, and nothing is sent,
        if the call cannot be written."""
        number = next(self._numbers)
        try:
            request = encode_request(Request(number, call))
        except Exception as error:
            logger.exception("replica %s: a call cannot be written", self.replica_id)
            raise ServiceError(error_info(error)) from error
        self._waiting[number] = deliver
        if self.broken:
            self._unreached.add(number)
        if self._lost is not None:
            self._loop.call_soon(self._give_up, number, self._lost)
        else:
            self._channel.send(request)
        return number

    def end(self, number: int, *, answered: bool) -> None:
        """Ends the call: nobody waits for it any more. If it is not `answered`, the replica is told to give it up."""
        self._unreached.discard(number)
        if self._waiting.pop(number, None) is not None and not answered and self._lost is None:
            self._channel.send(encode_request(Request(number)))

    def lose(self, gone: ReplicaGone) -> None:
        """Gives the replica up as gone: all calls that wait are told at once."""
        if self._lost is not None:
            return
        self._lost = gone
        self._clock.cancel()
        self._connection.close()
        for number in list(self._waiting):
            self._give_up(number, gone)
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
        self._unreached.clear()
        try:
            message = self._channel.take(header, body)
            if message is not None:
                self._take(decode_replies(message))
        except (ChannelLost, UnreadableMessage) as error:
            logger.warning("replica %s: the link is lost: %s", self.replica_id, error)
            self.lose(ReplicaGone(self.replica_id))

    def _take(self, replies: Replies) -> None:
        """Hands nothing out before other tasks have had the event loop. By then everything that the connection has is
        here, and a turn gets the events of several steps together."""
        if replies and not self._replies:
            self._loop.call_soon(self._hand_out)
        for number, item in replies:
            arrived = self._replies.get(number)
            if arrived is None:
                self._replies[number] = [item]
            else:
                arrived.append(item)

    def _hand_out(self) -> None:
        """Hands out to some calls, in order; to the rest after other tasks have had the event loop."""
        for number in list(itertools.islice(self._replies, CALLS_AT_ONCE)):
            for item in self._replies.pop(number):
                self._deliver(number, item)
        if self._replies:
            self._loop.call_soon(self._hand_out)

    def _deliver(self, number: int, item: Answer | TurnEvent | ReplicaGone) -> None:
        deliver = self._waiting.get(number)
        if deliver is not None:
            deliver(item)

    def _give_up(self, number: int, gone: ReplicaGone) -> None:
        had_call = number not in self._unreached
        self._deliver(number, ReplicaGone(gone.replica_id, gone.loss, had_call=had_call))

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
