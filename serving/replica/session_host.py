"""The sessions that live on this replica: taken over from the log, forked, ended, reported to the cluster controller.

Keeps three parties in step: SessionController (turns), the engine (KV) and the controller's ledger (ownership).
Used on the replica's event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from controllers.errors import (
    ControllerError,
    SessionMoved,
    SessionNotFound,
    StaleEpoch,
    TurnInFlight,
)
from controllers.records import ForkOrder, ReplicaAddress, ReplicaStatus, SessionRecord, SessionStatus
from controllers.session import SessionController
from controllers.session_keys import id_in, named, tenant_in
from controllers.session_reports import ReportWriter
from controllers.turns import Fork, Turn
from engine.api import Engine, EngineError, EngineStats, SessionBusy
from serving.background import BackgroundTasks
from serving.logs.audit_log import audit_event
from serving.replica.hand_over_pace import HandOverPace
from serving.replica.turn_request import history_chain
from serving.wire.controller_calls import ControllerCalls
from serving.wire.turns import ForkedSession

logger = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 1.0
"""A turn waits no longer for a place that may be better. A controller that is away keeps it from none."""
IN_USE_S = 1.0
"""Who had a turn so lately is likely to have the next one as soon."""
KV_WAIT_S = 0.05
"""How long a heartbeat waits for the engine, which answers between two steps."""

KV_LOOKS_PER_S = 10_000
"""So many sessions a heartbeat has the engine look at in a second, on average, to report the size of their KV."""

T = TypeVar("T")


class SessionHost:
    """`engine_timeout_s` bounds every wait for the engine to do something between two steps. `pace` is that of a drain,
    for sessions in use. `settings_hash` tells replicas of a rolling update's two sides apart. `on_loaded` hears how
    many seconds it took to load a session."""

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        sessions: SessionController,
        controller: ControllerCalls,
        tasks: BackgroundTasks,
        pace: HandOverPace,
        *,
        engine_timeout_s: float,
        settings_hash: str = "",
        on_loaded: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._sessions = sessions
        self._controller = controller
        self._tasks = tasks
        self._pace = pace
        self._engine_timeout_s = engine_timeout_s
        self._settings_hash = settings_hash
        self._on_loaded = on_loaded
        self._loading: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._forking: dict[str, asyncio.Task[ForkedSession]] = {}  # by child
        self._forked: dict[str, asyncio.Task[ForkedSession]] = {}  # by parent
        self._handing_over: dict[str, asyncio.Task[Any]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._reports = ReportWriter()
        self._kv_tokens: dict[str, int] = {}
        self._kv_asked: Future[dict[str, int]] | None = None
        self._next_kv_look_s = 0.0
        self._crowded = False
        self._draining = False
        self._left = False
        self._stuck = False
        """Whether nobody took the last session that was to go."""
        self.address: ReplicaAddress | None = None
        """Where front ends reach this replica, once they do."""

    async def hold(self, session_id: str, epoch: int) -> None:
        """Makes sure that the session is held at `epoch`, loading its committed history if need be.

        Raises StaleEpoch if this replica does not own it (any more), SessionNotFound if it has ended.
        """
        key = (session_id, epoch)
        while True:
            await self._settled(session_id)
            if self._sessions.knows(session_id, epoch):
                return
            held = self._sessions.epoch(session_id)
            if held is not None and held > epoch:
                raise StaleEpoch(f"{named(session_id)} is held at epoch {held}, not {epoch}")
            loading = self._loading.get(key)
            if loading is None:
                loading = self._loading[key] = self._tasks.start(self._load(session_id, epoch))
                loading.add_done_callback(lambda _: self._loading.pop(key, None))
            await self._tasks.outcome(loading)

    async def fork(self, parent_id: str, epoch: int, order: ForkOrder) -> ForkedSession:
        """Starts a session at the parent's first tokens. Once begun it comes to its end whoever still waits.

        Raises ControllerError; the child does not exist then, unless the log's answer was lost.
        """
        await self.hold(parent_id, epoch)
        await self._settled(order.child_id)
        while await self.fork_ended(parent_id):  # one fork after the other, each in milliseconds
            pass
        forking = self._tasks.start(self._fork(parent_id, epoch, order))
        self._forking[order.child_id] = self._forked[parent_id] = forking
        forking.add_done_callback(lambda _: self._forking.pop(order.child_id, None))
        forking.add_done_callback(lambda _: self._forked.pop(parent_id, None))
        return await self._tasks.outcome(forking)

    async def fork_ended(self, parent_id: str, timeout_s: float | None = None) -> bool:
        """Waits for a fork of the session that is being made. False if there is none, or it takes longer."""
        forking = self._forked.get(parent_id)
        if forking is None:
            return False
        done, _ = await asyncio.wait([forking], timeout=timeout_s)
        return bool(done)

    async def offer(self, session_id: str, epoch: int) -> None:
        """Lets another replica have the session, if this one is crowded, or drains and it is its turn to go. For a turn
        that begins, which keeps others away meanwhile. Raises SessionMoved: the turn is to end, and the session to be
        `let_go`."""
        if self._draining and not self._pace.may_go(self._sessions.committed_len(session_id)):
            return
        if self._draining or self._crowded:
            await self._offer(session_id, epoch)

    async def _offer(self, session_id: str, epoch: int) -> None:
        """Raises SessionMoved if another replica has it now."""
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                moved = await self._controller.offer_session(session_id, epoch, self._replica_id)
        except StaleEpoch:  # by an earlier try of this call
            moved = True
        except (ControllerError, TimeoutError) as error:
            # If it was moved nevertheless the turn is refused by its epoch, and goes on at the new owner.
            logger.warning("session %s: not offered to others: %r", session_id, error)
            self._crowded = False  # until the controller says so again: no other turn waits for it in vain
            moved = False
        if moved:
            audit_event(
                "session_moved", session_id=id_in(session_id), tenant=tenant_in(session_id), epoch=epoch
            )
            raise SessionMoved(f"{named(session_id)} has moved to another replica")
        self._pace.stayed()

    async def handed_over(self, session_id: str, handing_over: asyncio.Task[T]) -> T:
        """What it comes to. Turns that come for the session meanwhile wait; it goes on if the caller is cancelled."""
        self._handing_over[session_id] = handing_over
        handing_over.add_done_callback(partial(self._settle, session_id))
        return await self._tasks.outcome(handing_over)

    async def let_go(self, turn: Turn | Fork) -> None:
        """Ends a turn, or what keeps turns away, without a trace, and leaves nothing here of its session, which has
        moved, or may have."""
        if isinstance(turn, Fork):
            self._sessions.abort_fork(turn)
        else:
            self._sessions.abort_turn(turn)
        if not await self.turn_ended(turn.session_id):
            await self.release(turn.session_id)

    async def release(self, session_id: str) -> None:
        """Forgets an idle session here: its history and its KV. Its log and its ownership stay."""
        self._sessions.drop(session_id)
        await self._free_kv(session_id)

    async def close(self, session_id: str, epoch: int | None = None) -> bool:
        """Ends the session for good, now or when its turn in flight has ended. False if it is not held here (at that
        epoch, if given: a call that is repeated late closes no later session of its name), or owned by another by now.

        A close that waits is in the log before this returns: whoever owns the session then carries it out. Raises
        ControllerError if the ledger could not be told.
        """
        if epoch is not None and (loading := self._loading.get((session_id, epoch))) is not None:
            with suppress(ControllerError):  # else it would be held here when it is closed already
                await self._tasks.outcome(loading)
        held = self._sessions.epoch(session_id)
        if held is None or epoch not in (None, held):
            return False
        turn_key = self._sessions.close(session_id)
        try:
            if turn_key is None:
                await self._end(session_id, held)
            else:
                await self._controller.close_after(session_id, held, turn_key)
        except StaleEpoch:
            return False
        except SessionNotFound:  # the turn has ended meanwhile, and the session with it
            return True
        return True

    async def turn_ended(self, session_id: str) -> bool:
        """Carries out a close that waited for the turn which has just ended. False if there was none."""
        if not self._sessions.is_closed(session_id):
            return False
        await self._end_quietly(session_id)
        return True

    async def cut_kv(self, session_id: str, length: int) -> None:
        """Frees the session's KV past `length` tokens: for the memory alone, like `_free_kv`."""
        try:
            await self._from_engine(self._engine.rewind_session(session_id, length))
        except (EngineError, TimeoutError) as error:
            logger.warning("session %s: KV not cut: %r", session_id, error)

    async def expire_idle(self) -> None:
        """Ends the sessions past their idle timeout, or that are to be closed, never one with a turn in flight."""
        for session_id in self._sessions.expired():
            # It may have been used while another was ended.
            if self._sessions.is_expired(session_id):
                logger.info("session %s: idle timeout", session_id)
                await self._end_quietly(session_id)

    async def heartbeat(self) -> None:
        """Reports load, and of the sessions what is new; drops those that turn out to be closed or owned elsewhere.

        It does not wait for the engine's step: who is slow is not dead. Who has said farewell says no more.
        """
        if self._left:
            return
        await self._look_at_kv()
        self._reports.note(self._sessions.take_changed())
        await self._report()
        while self._reports.has_more and not self._left:
            await self._report()

    async def drain(self) -> None:
        """This replica is to go: it gets no more sessions, and hands over those that it has. For good.

        Raises NoReplica where nobody could take them. Where the controller does not answer, a heartbeat tells whether
        it had heard.
        """
        await self._controller.drain_replica(self._replica_id)
        self._begin_drain()

    async def hand_over(self) -> None:
        """Of a replica that drains: lets others have the sessions that have no turn, one after another, those in use
        last and at their pace. A turn that comes for one meanwhile waits, and finds it moved."""
        held = self._sessions.snapshot() if self._draining else []
        for status in sorted(held, key=lambda status: -status.idle_s):
            if status.in_turn or status.closing or status.session_id in self._handing_over:
                continue
            if status.idle_s < IN_USE_S and not self._pace.may_go(status.tokens):
                continue
            handing_over = self._tasks.start(self._hand_over(status.session_id, status.epoch))
            self._stuck = not await self.handed_over(status.session_id, handing_over)
            if self._stuck:
                return  # nor the others

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def emptied(self) -> bool:
        """Whether this replica is to go for good, and holds nothing any more."""
        return self._draining and not len(self._sessions)

    @property
    def hands_over(self) -> bool:
        """Whether it has sessions that others are to take, and do."""
        return self._draining and not self._stuck and bool(len(self._sessions))

    async def farewell(self, fault: str = "") -> None:
        """Says that this replica answers nothing any more, and for which fault, if it is for one. Never raises: whoever
        misses it notices."""
        self._left = True
        try:
            if fault:
                await self._controller.register_replica(replace(self.status(), fault=fault))
            await self._controller.deregister_replica(self._replica_id)
        except ControllerError as error:
            logger.warning("the controller was not told of the end: %s", error)

    def status(self) -> ReplicaStatus:
        """This replica's load. Cached pages count as free: they give way."""
        stats = self._engine.stats()
        return ReplicaStatus(
            replica_id=self._replica_id,
            free_tokens=(stats.pages.free + stats.pages.cached) * stats.page_size,
            total_tokens=stats.pages.total * stats.page_size,
            sessions=stats.sessions,
            running=stats.running,
            waiting=stats.waiting,
            draining=self._draining,
            step_age_s=self._engine.step_age_s,
            settings_hash=self._settings_hash,
            address=self.address,
        )

    def _begin_drain(self) -> None:
        """For good."""
        if not self._draining:
            self._draining = True
            self._pace.begin()

    async def _report(self) -> None:
        report = self._reports.next(partial(self._status_of, self._engine.stats()), self._sessions.held)
        load = self.status()
        if self._reports.tells_all_in(report):
            load = replace(load, held=len(self._sessions))
        reply = await self._controller.heartbeat(load, report)
        self._reports.answered(report, reply)
        self._crowded = reply.crowded
        if reply.draining:  # the controller's answer to `drain` may have been lost
            self._begin_drain()
        if not reply.known:
            await self._controller.register_replica(load)
        for session_id, epoch in zip(reply.stale_sessions, reply.stale_epochs, strict=True):
            if self._sessions.epoch(session_id) == epoch:
                self._drop_stale(session_id)

    def _status_of(self, stats: EngineStats, session_id: str) -> SessionStatus | None:
        status = self._sessions.status(session_id)
        if status is None:
            return None
        num_tokens = self._kv_tokens.get(session_id, 0)
        windowed = min(num_tokens, stats.window_len or 0)
        total = num_tokens * stats.page_size_bytes + windowed * stats.window_page_size_bytes
        return replace(status, size_bytes=total // stats.page_size)

    async def _look_at_kv(self) -> None:
        """Tokens of KV by session: as the engine says between two steps, or as it last said where a step takes long.
        It looks at every session, so the more there are the rarer it is asked."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_kv_look_s:
            return
        try:
            asked = self._kv_asked or self._engine.session_kv_tokens()
        except EngineError:
            return
        waiting = asyncio.wrap_future(asked)
        done, _ = await asyncio.wait([waiting], timeout=KV_WAIT_S)
        self._kv_asked = None if done else asked
        if done and waiting.exception() is None:
            before, self._kv_tokens = self._kv_tokens, waiting.result()
            self._reports.note(_differing(before, self._kv_tokens))
            self._next_kv_look_s = now_s + len(self._kv_tokens) / KV_LOOKS_PER_S

    async def _settled(self, session_id: str) -> None:
        """Waits until no fork is making this session, since its KV and its history come together, and until it is not
        being handed over, or ended."""
        tables: tuple[dict[str, asyncio.Task[Any]], ...] = (self._forking, self._handing_over, self._ending)
        while True:
            busy = [tasks[session_id] for tasks in tables if session_id in tasks]
            if not busy:
                return
            await asyncio.wait(busy)

    async def _hand_over(self, session_id: str, epoch: int) -> bool:
        """False if nobody takes it. Turns are kept away as by a fork, which asks for no room in the session."""
        try:
            kept_away = self._sessions.begin_fork(session_id, epoch, 0)
        except ControllerError:  # it has a turn by now, or has ended
            return True
        try:
            await self._offer(session_id, epoch)
        except SessionMoved:
            await self.let_go(kept_away)
            return True
        self._sessions.abort_fork(kept_away)
        await self.turn_ended(session_id)
        return False

    def _settle(self, session_id: str, _task: asyncio.Task[Any]) -> None:
        self._handing_over.pop(session_id, None)

    async def _fork(self, parent_id: str, epoch: int, order: ForkOrder) -> ForkedSession:
        """Log first: a child that this replica does not live to hold is loaded by another one."""
        fork = self._sessions.begin_fork(parent_id, epoch, order.length)
        try:
            length = fork.history_len
            order = replace(order, length=length)
            child = await self._controller.fork_session(parent_id, epoch, self._replica_id, order)
            kv_tokens = await self._share_kv(fork, child)
        except BaseException:
            self._sessions.abort_fork(fork)
            raise
        else:
            self._sessions.finish_fork(fork, child)
        finally:
            await self.turn_ended(parent_id)
        return ForkedSession(child.session_id, length, min(kv_tokens, length))

    async def _share_kv(self, fork: Fork, child: SessionRecord) -> int:
        """Tokens of KV that the child has. It can do with none: its first turn computes what is missing."""
        try:
            if self._sessions.knows(child.session_id, child.epoch):
                kv_tokens = await self._from_engine(self._engine.session_kv_tokens())
                return kv_tokens.get(child.session_id, 0)
            return await self._from_engine(
                self._engine.fork_session(
                    fork.session_id, child.session_id, fork.history, fork.history_len, history_chain(fork)
                )
            )
        except (EngineError, TimeoutError) as error:
            logger.warning("session %s: forked without KV: %r", child.session_id, error)
            return 0

    async def _load(self, session_id: str, epoch: int) -> None:
        began_s = asyncio.get_running_loop().time()
        record = await self._controller.load_session(session_id, epoch, self._replica_id)
        # The engine takes this ahead of the turn's request, between the same two steps: the turn waits for neither.
        self._tasks.start(self._free_kv(session_id))
        self._sessions.adopt(record)
        self._on_loaded(asyncio.get_running_loop().time() - began_s)

    async def _end(self, session_id: str, epoch: int) -> None:
        """Ends an idle session whoever still waits. A turn that comes meanwhile finds it ended.

        Raises ControllerError if the ledger could not be told: it then ends the session, which nobody holds any more,
        once its idle timeout is over.
        """
        self._sessions.drop(session_id)
        ending = self._ending[session_id] = self._tasks.start(self._end_dropped(session_id, epoch))
        ending.add_done_callback(lambda _: self._ending.pop(session_id, None))
        await self._tasks.outcome(ending)

    async def _end_dropped(self, session_id: str, epoch: int) -> None:
        await self._free_kv(session_id)
        await self._controller.close_session(session_id, None, epoch)

    async def _end_quietly(self, session_id: str) -> None:
        epoch = self._sessions.epoch(session_id)
        assert epoch is not None
        try:
            await self._end(session_id, epoch)
        except ControllerError as error:
            logger.warning("session %s: not closed in the ledger: %s", session_id, error)

    def _drop_stale(self, session_id: str) -> None:
        """Nobody waits for its KV, least of all a heartbeat: the engine frees it between two steps."""
        try:
            self._sessions.drop(session_id)
        except TurnInFlight:
            logger.warning("session %s moved during a turn; the turn will fail to commit", session_id)
        else:
            self._tasks.start(self._free_kv(session_id))

    def _free_kv(self, session_id: str) -> Coroutine[Any, Any, None]:
        """For the memory alone: KV from an earlier ownership is used as far as it is of the history, no further. The
        engine is asked at once; who awaits what is returned waits for it."""
        try:
            return self._freed(session_id, self._engine.close_session(session_id))
        except EngineError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return self._freed(session_id, refused)

    async def _freed(self, session_id: str, asked: Future[None]) -> None:
        try:
            await self._from_engine(asked)
        except SessionBusy:
            logger.warning("session %s: KV still in use", session_id)
        except (EngineError, TimeoutError) as error:
            logger.warning("session %s: KV not freed: %r", session_id, error)

    async def _from_engine(self, future: Future[T]) -> T:
        """Waits so long and no longer; what was asked of the engine is done all the same, once it gets to it."""
        async with asyncio.timeout(self._engine_timeout_s):
            return await asyncio.shield(asyncio.wrap_future(future))


def _differing(before: dict[str, int], after: dict[str, int]) -> set[str]:
    """Keys of what is not in both."""
    return {key for key, _ in before.items() ^ after.items()}
