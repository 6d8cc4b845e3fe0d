"""ReplicaDrain: how a replica empties itself before it goes. All of draining is here; others only ask and tell.

    UP --order, or the controller says so--> DRAINING --no session, no call--> DRAINED

While it drains it gets no more sessions, and hands over those that it has. Once drained, it has none left, every call
is answered, and it is to be replaced. There is no way back, and it does not matter who asked: an operator, Serve's end
of the replica, or the controller.

A session moves without its KV: its next owner computes its history before the first token. If all sessions moved at
once, each would wait for the histories of the others. So those in use move one at a time. The next one may go when the
history of the last should have been computed. Until then its turns run here, where its KV is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from controllers.errors import ControllerError, SessionMoved
from controllers.records import SessionStatus
from controllers.session import SessionController
from controllers.session_keys import named
from serving.replica.session_host import SessionHost
from serving.replica.session_offers import Offered, SessionOffers
from serving.wire.controller_calls import ControllerCalls

logger = logging.getLogger(__name__)

IN_USE_S = 1.0
"""A session whose last turn ended less than this ago is in use: its next turn is likely to come soon."""
HAND_OVER_INTERVAL_S = 0.1
DRAIN_AGAIN_S = 1.0
"""How long a replica that is to end waits before it asks to drain again, and before it offers sessions again that
nobody took. The others may only be suspect, or not heard yet by a controller that has just started."""
LAST_ANSWERS_S = 1.0
"""How long the last answer may be on its way. The replica leaves only after that, since front ends then leave it."""


class HandOvers:
    """What a replica knows of its hand-overs from when it begins to drain. `clock` returns monotonic seconds. A replica
    computes `tokens_per_s` of a history.

    `within_s` after the drain began, all sessions may go at once: the replica is stopped soon, and its turns with it.
    """

    def __init__(self, clock: Callable[[], float], tokens_per_s: float, within_s: float) -> None:
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._next_s = clock()
        self._until_s = self._next_s + within_s
        self.look_s = self._next_s
        """From when on sessions between two turns are offered. A look at all sessions takes 3 µs for each."""
        self._going = ""  # the last session that might go
        self._unanswered: set[str] = set()
        self.no_taker = False
        """Whether no replica took the last session between two turns."""
        self.ended = False

    def in_order(self, held: list[SessionStatus]) -> list[str]:
        """The sessions in the order in which they are offered: first those that have been idle for longest, and last
        those whose last offer was not answered. So one that cannot be offered keeps no other."""
        self._unanswered.intersection_update(status.session_id for status in held)
        in_order = sorted(held, key=lambda each: (each.session_id in self._unanswered, -each.idle_s))
        return [status.session_id for status in in_order]

    def may_go(self, session_id: str, tokens: int) -> bool:
        """Whether a session in use, with `tokens` tokens of history, may go now. If so, the caller must offer it."""
        now_s = self._clock()
        if now_s >= self._until_s:
            return True
        if now_s < self._next_s:
            return False
        self._next_s, self._going = now_s + tokens / self._tokens_per_s, session_id
        return True

    def told(self, session_id: str, offered: Offered) -> None:
        """Notes what came of an offer. If a session that might go stayed, the next one may go at once."""
        if offered is not Offered.MOVED and session_id == self._going:
            self._next_s = self._clock()
        if offered is Offered.NO_ANSWER:
            self._unanswered.add(session_id)
        else:
            self._unanswered.discard(session_id)


class ReplicaDrain:
    """Drains this replica. Used on its event loop only. `calls` is how many calls of front ends are under way; for
    `clock`, `tokens_per_s` and `within_s` see HandOvers."""

    def __init__(
        self,
        replica_id: str,
        host: SessionHost,
        sessions: SessionController,
        offers: SessionOffers,
        controller: ControllerCalls,
        *,
        calls: Callable[[], int],
        clock: Callable[[], float],
        tokens_per_s: float,
        within_s: float,
    ) -> None:
        self._replica_id = replica_id
        self._host = host
        self._sessions = sessions
        self._offers = offers
        self._controller = controller
        self._calls = calls
        self._clock = clock
        self._tokens_per_s = tokens_per_s
        self._within_s = within_s
        self._answered_s = clock()
        self._hand_overs: HandOvers | None = None  # None: it does not drain

    @property
    def draining(self) -> bool:
        """Whether the drain has begun. It never ends otherwise than with the replica."""
        return self._hand_overs is not None

    @property
    def drained(self) -> bool:
        """Whether the drain has ended: the replica is to be replaced."""
        return self._hand_overs is not None and self._hand_overs.ended

    @property
    def emptied(self) -> bool:
        """Whether this replica drains and holds no more sessions."""
        return self.draining and not len(self._sessions)

    @property
    def hands_over(self) -> bool:
        """Whether this replica drains, still holds sessions, and other replicas take them."""
        return self._hand_overs is not None and not self._hand_overs.no_taker and bool(len(self._sessions))

    async def order(self) -> None:
        """Begins to drain, for good.

        Raises NoReplica if no other replica could take the sessions. If the controller does not answer, a later
        heartbeat tells whether it received the order.
        """
        await self._controller.drain_replica(self._replica_id)
        self.begin()

    def begin(self) -> None:
        """To be called when the controller says that this replica drains. Only the first call does anything."""
        if self._hand_overs is None:
            self._hand_overs = HandOvers(self._clock, self._tokens_per_s, self._within_s)

    async def offer(self, session_id: str, epoch: int) -> None:
        """Offers the session to other replicas if this one is crowded, or if it drains and the pace allows it.

        Called for a turn that begins; that turn keeps other turns away meanwhile. Raises SessionMoved if another
        replica took the session. The caller must then end the turn with `let_go`."""
        if self._hand_overs is None:
            offers = self._offers.asked_for(session_id)
        else:
            offers = self._hand_overs.may_go(session_id, self._sessions.committed_len(session_id))
        if offers and await self._offer(session_id, epoch) is Offered.MOVED:
            raise SessionMoved(f"{named(session_id)} has moved to another replica")

    async def hand_over(self) -> None:
        """On a draining replica, hands over the sessions without a turn, one after another. Sessions in use go at the
        pace. A turn for a session that is being handed over waits, and then finds it moved. To be called every
        HAND_OVER_INTERVAL_S.

        The sessions of a shard that has not answered stay until the next call. So each call waits for a shard once. If
        no replica takes a session, all stay for DRAIN_AGAIN_S."""
        if self._hand_overs is None or self._clock() < self._hand_overs.look_s:
            return
        silent: set[int] = set()
        for session_id in self._hand_overs.in_order(self._sessions.snapshot()):
            shard = self._controller.shard_of(session_id)
            status = self._sessions.status(session_id)  # it may have changed while others were offered
            if status is None or shard in silent or not self._may_go(status, self._hand_overs):
                continue
            offered = await self._host.handed_over(session_id, self._hand_over(session_id, status.epoch))
            self._hand_overs.no_taker = offered is Offered.NO_TAKER
            if offered is Offered.NO_TAKER:  # no replica takes the others either
                self._hand_overs.look_s = self._clock() + DRAIN_AGAIN_S
                return
            if offered is Offered.NO_ANSWER:
                silent.add(shard)

    def answered(self) -> None:
        """To be called when a turn has been answered."""
        self._answered_s = self._clock()

    def end_if_empty(self) -> bool:
        """Ends the drain if nothing is left to wait for. True if it ended just now: the replica must say farewell."""
        if self._hand_overs is None or self.drained or not (self._answered_all and self.emptied):
            return False
        self._hand_overs.ended = True
        return True

    async def retire(self, within_s: float) -> None:
        """Prepares for the end: lets turns finish and has sessions handed over, for at most `within_s`, and while
        another replica takes them. The sessions that are left are in the log."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._try_to_order()
                tried_s = self._clock()
                while self.hands_over or not self._answered_all:
                    await asyncio.sleep(HAND_OVER_INTERVAL_S)
                    if not self.draining and self._clock() - tried_s >= DRAIN_AGAIN_S:
                        await self._try_to_order()
                        tried_s = self._clock()

    @property
    def _answered_all(self) -> bool:
        """Whether no call is under way, and the last answer has had LAST_ANSWERS_S to arrive."""
        return not self._calls() and self._clock() - self._answered_s > LAST_ANSWERS_S

    async def _try_to_order(self) -> None:
        try:
            await self.order()
        except Exception as error:  # of whatever kind: the turns must end first
            logger.info("the sessions stay in the log: %r", error)

    def _may_go(self, status: SessionStatus, hand_overs: HandOvers) -> bool:
        if status.in_turn or status.closing or self._host.is_busy(status.session_id):
            return False
        return status.idle_s >= IN_USE_S or hand_overs.may_go(status.session_id, status.tokens)

    async def _hand_over(self, session_id: str, epoch: int) -> Offered | None:
        """None if the session now has a turn, or has ended."""
        try:
            async with self._host.kept_still(session_id, epoch) as stay:
                offered = await self._offer(session_id, epoch)
                stay.moved = offered is Offered.MOVED
        except ControllerError:
            return None
        return offered

    async def _offer(self, session_id: str, epoch: int) -> Offered:
        offered = await self._offers.offer(session_id, epoch)
        if self._hand_overs is not None:
            self._hand_overs.told(session_id, offered)
        return offered
