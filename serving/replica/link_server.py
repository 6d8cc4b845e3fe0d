"""A replica's end of the links: it takes the calls of front ends and sends answers and the events of turns.

All that one engine step yields for the turns of a front end leaves in one message. While a front end has not taken the
last messages, new events are merged. So memory is bounded by the turns' output, and a slow front end gets fewer and
larger events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from serving.background import BackgroundTasks
from serving.wire.calls import (
    Answer,
    AnyCall,
    Replies,
    Request,
    UnknownCall,
    UnreadableMessage,
    decode_request,
    encode_replies,
)
from serving.wire.channel import Channel, ChannelLost, begins, lost_header
from serving.wire.errors import error_event, error_info
from serving.wire.peer_sockets import Peer
from serving.wire.turn_events import event_weight, merge_events, split_event
from serving.wire.turns import TurnEvent
from serving.wire.versions import UNKNOWN_CALL

logger = logging.getLogger(__name__)

Emit = Callable[[Answer | TurnEvent], None]
"""Sends an answer or an event of a call to its front end."""

RunCall = Callable[[AnyCall, Emit], Coroutine[Any, Any, None]]
"""Carries out a call. Cancelling it gives the call up. It raises nothing but CancelledError."""

MESSAGES_AHEAD = 64
BYTES_AHEAD = 4 * 2**20
"""The window: a front end is sent no more once it has not taken this many messages or bytes."""

EVENT_WEIGHT = 1024
MESSAGE_WEIGHT = 2048
"""The most log-probabilities in one event and in one message: more would block an event loop."""

SIGN_OF_LIFE_S = 2.0
SILENCE_S = 20.0
UNREACHABLE_S = 5.0
"""A front end that is silent for SILENCE_S or unreachable for UNREACHABLE_S is gone, and its calls are given up."""
TICK_S = 0.5


class PeerConnections(Protocol):
    """The sockets that front ends connect to."""

    def send(self, peer: Peer, header: bytes, body: bytes) -> bool:
        """False if the peer is not connected now. It may connect again."""


class LinkServer:
    """The links of all front ends. Used on the replica's event loop only. The sockets call `frame_came`."""

    def __init__(self, connections: PeerConnections, run: RunCall, tasks: BackgroundTasks) -> None:
        self._connections = connections
        self._run = run
        self._tasks = tasks
        self._links: dict[Peer, PeerLink] = {}

    def __len__(self) -> int:
        """How many front ends are connected."""
        return len(self._links)

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return sum(len(link.calls) for link in self._links.values())

    def frame_came(self, peer: Peer, header: bytes, body: bytes) -> None:
        link = self._links.get(peer)
        if link is None:
            if not begins(header):
                self._connections.send(peer, lost_header(), b"")
                return
            link = self._links[peer] = PeerLink(peer, self._connections, self._run, self._tasks)
        try:
            link.frame_came(header, body)
        except (ChannelLost, UnreadableMessage) as error:
            logger.warning("a front end's link is lost: %s", error)
            self._connections.send(peer, lost_header(), b"")
            self._drop(peer)

    async def watch(self) -> None:
        """Sends signs of life, and drops front ends that are gone. To be called every TICK_S."""
        for peer, link in list(self._links.items()):
            if link.gone:
                logger.info("a front end is gone, with %d calls", len(link.calls))
                self._drop(peer)
            else:
                link.give_sign_of_life()

    def _drop(self, peer: Peer) -> None:
        for task in self._links.pop(peer).calls.values():
            task.cancel()


Unsent = list[Answer | TurnEvent]
"""What is still to be sent for one call: events, or its answer."""


def next_reply(unsent: Unsent, room: int) -> tuple[Answer | TurnEvent | None, int]:
    """Removes and returns what is sent next, with its weight: the answer, or events merged up to EVENT_WEIGHT. Returns
    None, and removes nothing, if that weighs more than `room`."""
    first = unsent[0]
    if isinstance(first, Answer):
        return unsent.pop(0), 0
    weight = event_weight(first)
    if len(unsent) == 1:
        return (unsent.pop(), weight) if weight <= room else (None, 0)
    events = [first]
    for item in unsent[1:]:
        if isinstance(item, Answer) or weight + event_weight(item) > EVENT_WEIGHT:
            break
        events.append(item)
        weight += event_weight(item)
    if weight > room:
        return None, 0
    del unsent[: len(events)]
    return merge_events(events), weight


class PeerLink:
    """One front end's calls, by number, and what is to be sent to it.

    Invariant: what waits to be sent is small, or the front end has not taken a whole window of messages."""

    def __init__(
        self, peer: Peer, connections: PeerConnections, run: RunCall, tasks: BackgroundTasks
    ) -> None:
        self.calls: dict[int, asyncio.Task[None]] = {}
        self._peer = peer
        self._connections = connections
        self._run = run
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._channel = Channel(self._transmit)
        self._unsent: dict[int, Unsent] = {}
        self._flushing = False
        self._heard_s = self._sent_s = self._loop.time()
        self._unreachable_s: float | None = None

    @property
    def gone(self) -> bool:
        now_s = self._loop.time()
        if self._unreachable_s is not None and now_s - self._unreachable_s > UNREACHABLE_S:
            return True
        return now_s - self._heard_s > SILENCE_S

    def give_sign_of_life(self) -> None:
        if self._loop.time() - self._sent_s >= SIGN_OF_LIFE_S:
            self._channel.state()

    def frame_came(self, header: bytes, body: bytes) -> None:
        """Raises ChannelLost and UnreadableMessage."""
        self._heard_s, self._unreachable_s = self._loop.time(), None
        message = self._channel.take(header, body)
        if message is not None:
            try:
                self._take(decode_request(message))
            except UnknownCall as unknown:
                self.put(unknown.number, Answer(error=UNKNOWN_CALL))
        if self._unsent:
            self._flush_soon()

    def put(self, number: int, item: Answer | TurnEvent) -> None:
        """Queues an answer or event of a call. It is sent together with what other calls put before the event loop
        runs its next callbacks."""
        unsent = self._unsent.get(number)
        if unsent is None:
            unsent = self._unsent[number] = []
        if isinstance(item, Answer) or event_weight(item) <= EVENT_WEIGHT:
            unsent.append(item)
        else:
            unsent.extend(split_event(item, EVENT_WEIGHT))
        self._flush_soon()

    def _take(self, request: Request) -> None:
        number, call = request.number, request.call
        if call is None:
            self._give_up(number)
            return
        task = self.calls[number] = self._tasks.start(self._run(call, partial(self.put, number)))
        task.add_done_callback(lambda _: self.calls.pop(number, None))

    def _give_up(self, number: int) -> None:
        if (running := self.calls.get(number)) is not None:
            running.cancel()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._channel.unread >= MESSAGES_AHEAD or self._channel.unread_bytes >= BYTES_AHEAD:
            return  # the front end's next frame opens the window, or leads here again
        replies: Replies = []
        room = MESSAGE_WEIGHT
        left: dict[int, Unsent] = {}
        for number, unsent in self._unsent.items():
            reply, weight = next_reply(unsent, room)
            if reply is not None:
                replies.append((number, reply))
                room -= weight
            if unsent:
                left[number] = unsent
        self._unsent = left
        if replies:
            self._channel.send(self._encoded(replies))
        if self._unsent:
            self._flush_soon()

    def _encoded(self, replies: Replies) -> bytes:
        """The replies as bytes. One that cannot be written becomes an error of its own call."""
        try:
            return encode_replies(replies)
        except Exception:
            return encode_replies([(number, self._writable(number, reply)) for number, reply in replies])

    def _writable(self, number: int, reply: Answer | TurnEvent) -> Answer | TurnEvent:
        """The reply; or, if it cannot be written, an error in its place, which is the last that the call sends."""
        try:
            encode_replies([(number, reply)])
        except Exception as error:
            logger.exception("a reply cannot be written")
            self._unsent.pop(number, None)
            self._give_up(number)
            return Answer(error=error_info(error)) if isinstance(reply, Answer) else error_event(error)
        return reply

    def _transmit(self, header: bytes, body: bytes) -> None:
        self._sent_s = self._loop.time()
        if not self._connections.send(self._peer, header, body) and self._unreachable_s is None:
            self._unreachable_s = self._loop.time()
