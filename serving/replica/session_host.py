"""The sessions held on this replica: loaded from the log, forked, let go, ended.

Keeps three parties in step: SessionController (turns), the engine (KV) and the cluster controller's ledger (ownership).
Used on the replica's event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from controllers.errors import (
    ControllerError,
    SessionNotFound,
    StaleEpoch,
    TurnInFlight,
)
from controllers.records import ForkOrder, SessionRecord
from controllers.session import SessionController
from controllers.session_keys import named
from controllers.turns import Fork, Turn
from engine.api import Engine, EngineError, SessionBusy
from serving.background import BackgroundTasks, TasksByKey
from serving.replica.engine_answers import carried_out
from serving.replica.turn_request import history_chain
from serving.wire.controller_calls import ControllerCalls
from serving.wire.turns import ForkedSession

logger = logging.getLogger(__name__)

ENDS_AT_ONCE = 64  # idle sessions: each waits for a step of the engine and for the controller

T = TypeVar("T")


@dataclass(slots=True)
class Stay:
    """Whether a session that is kept still has moved to another replica, or may have."""

    moved: bool = False


class SessionHost:
    """Holds this replica's sessions. `on_loaded` is called with the seconds that loading a session took."""

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        sessions: SessionController,
        controller: ControllerCalls,
        tasks: BackgroundTasks,
        *,
        on_loaded: Callable[[float], None],
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._sessions = sessions
        self._controller = controller
        self._tasks = tasks
        self._on_loaded = on_loaded
        self._loading: TasksByKey[tuple[str, int], None] = TasksByKey()
        self._forking: TasksByKey[str, ForkedSession] = TasksByKey()  # by child
        self._forked: TasksByKey[str, ForkedSession] = TasksByKey()  # by parent
        self._handing_over: TasksByKey[str, Any] = TasksByKey()
        self._ending: TasksByKey[str, None] = TasksByKey()

    async def hold(self, session_id: str, epoch: int) -> None:
        """Makes sure that this replica holds the session at `epoch`, and loads its committed history if needed.

        Raises StaleEpoch if this replica does not own the session at `epoch`, SessionNotFound if it has ended.
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
                loading = self._loading.put(key, self._tasks.start(self._load(session_id, epoch)))
            await self._tasks.outcome(loading)

    async def hold_unforked(self, session_id: str, epoch: int) -> None:
        """The same, between two forks of the session, which take milliseconds each. Raises what `hold` raises."""
        await self.hold(session_id, epoch)
        while await self.fork_ended(session_id):
            await self.hold(session_id, epoch)  # whoever waited, too, may have moved the session meanwhile

    async def fork(self, parent_id: str, epoch: int, order: ForkOrder) -> ForkedSession:
        """Starts a session from the parent's first tokens. A fork that has begun completes even if the caller is
        cancelled.

        Raises ControllerError. The child then does not exist, unless only the log's answer was lost.
        """
        await self.hold_unforked(parent_id, epoch)
        while self.is_busy(order.child_id):
            await self._settled(order.child_id)
            await self.hold_unforked(parent_id, epoch)
        forking = self._tasks.start(self._fork(parent_id, epoch, order))
        self._forking.put(order.child_id, forking)
        self._forked.put(parent_id, forking)
        return await self._tasks.outcome(forking)

    async def fork_ended(self, parent_id: str, timeout_s: float | None = None) -> bool:
        """Waits for a fork of the session that is under way. False if there is none, or if it takes longer."""
        forking = self._forked.get(parent_id)
        if forking is None:
            return False
        done, _ = await asyncio.wait([forking], timeout=timeout_s)
        return bool(done)

    async def handed_over(self, session_id: str, handing_over: Coroutine[Any, Any, T]) -> T:
        """Returns the outcome of `handing_over`. New turns of the session wait until it is done. It continues if the
        caller is cancelled."""
        return await self._tasks.outcome(self._handing_over.put(session_id, self._tasks.start(handing_over)))

    @asynccontextmanager
    async def kept_still(self, session_id: str, epoch: int) -> AsyncIterator[Stay]:
        """Keeps turns of an idle session away inside the block, as a fork of length 0. After the block it is
        released if `moved` is set. Raises ControllerError if the session is not held at `epoch`, or not
        idle."""
        kept, stay = self._sessions.begin_fork(session_id, epoch, 0), Stay()
        try:
            yield stay
        finally:
            self._sessions.abort_fork(kept)
            if not await self.turn_ended(session_id) and stay.moved:
                await self.release(session_id)

    def is_busy(self, session_id: str) -> bool:
        """Whether the session is being made by a fork, handed over or ended."""
        return bool(self._busy(session_id))

    async def let_go(self, turn: Turn) -> None:
        """Aborts a turn and releases its session, which has moved or may have moved."""
        self._sessions.abort_turn(turn)
        if not await self.turn_ended(turn.session_id):
            await self.release(turn.session_id)

    async def release(self, session_id: str) -> None:
        """Forgets an idle session's history and KV here. Its log and its ownership stay."""
        self._sessions.drop(session_id)
        await self._free_kv(session_id)

    async def close(self, session_id: str, epoch: int) -> bool:
        """Ends the session for good, now or when its turn in flight has ended. False if it is not held here at `epoch`,
        or if another replica owns it by now. So a call that is repeated late does not close a later session of the same
        name.

        A close that waits for a turn is in the log before this returns. Whoever owns the session when the turn has
        ended carries it out. Raises ControllerError if the ledger could not be told.
        """
        if (loading := self._loading.get((session_id, epoch))) is not None:
            with suppress(ControllerError):  # without waiting, it could be loaded after it was closed
                await self._tasks.outcome(loading)
        if not self._sessions.knows(session_id, epoch):
            return False
        turn_key = self._sessions.close(session_id)
        try:
            if turn_key is None:
                await self._end(session_id, epoch)
            else:
                await self._controller.close_after(session_id, epoch, turn_key)
        except StaleEpoch:
            return False
        except SessionNotFound:  # the turn has ended meanwhile, and the session with it
            return True
        return True

    async def turn_ended(self, session_id: str) -> bool:
        """Carries out a close that waited for the turn that has just ended. False if none waited."""
        if not self._sessions.is_closed(session_id):
            return False
        await self._end_quietly(session_id)
        return True

    def cut_kv(self, session_id: str, length: int) -> Coroutine[Any, Any, None]:
        """Frees the session's KV past `length` tokens, see `_freed_by`."""
        return self._freed_by(session_id, lambda: self._engine.rewind_session(session_id, length))

    async def expire_idle(self) -> None:
        """Ends sessions that are past their idle timeout or to be closed, but never one with a turn in flight."""
        expired = self._sessions.expired()
        for at in range(0, len(expired), ENDS_AT_ONCE):
            await asyncio.gather(*map(self._end_if_idle, expired[at : at + ENDS_AT_ONCE]))

    async def _end_if_idle(self, session_id: str) -> None:
        if self._sessions.is_expired(session_id):  # it may have been used while others ended
            logger.info("session %s: idle timeout", session_id)
            await self._end_quietly(session_id)

    def drop_stale(self, session_id: str, epoch: int) -> None:
        """Drops a session that is owned elsewhere or closed, if it is held at `epoch`. Its KV is freed in the
        background, so that the heartbeat does not wait for the engine."""
        if self._sessions.epoch(session_id) != epoch:
            return
        try:
            self._sessions.drop(session_id)
        except TurnInFlight:
            logger.warning("session %s moved during a turn; the turn will fail to commit", session_id)
        else:
            self._tasks.start(self._free_kv(session_id))

    async def _settled(self, session_id: str) -> None:
        """Waits until the session is not being made by a fork, handed over or ended. (A fork sets KV and history
        together.)"""
        while busy := self._busy(session_id):
            await asyncio.wait(busy)

    def _busy(self, session_id: str) -> list[asyncio.Task[Any]]:
        tables: tuple[TasksByKey[str, Any], ...] = (self._forking, self._handing_over, self._ending)
        return [task for table in tables if (task := table.get(session_id)) is not None]

    async def _fork(self, parent_id: str, epoch: int, order: ForkOrder) -> ForkedSession:
        """Writes the child to the log first. If this replica then dies, another one loads the child."""
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
        """Shares the parent's KV with the child; returns how many tokens of KV it has. None are needed: the child's
        first turn computes what is missing."""
        try:
            if self._sessions.knows(child.session_id, child.epoch):
                kv_tokens = await carried_out(self._engine.session_kv_tokens())
                return kv_tokens.get(child.session_id, 0)
            return await carried_out(
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
        # The engine frees it before it takes the turn's request, between the same two steps. So the turn need not wait.
        self._tasks.start(self._free_kv(session_id))
        self._sessions.adopt(record)
        self._on_loaded(asyncio.get_running_loop().time() - began_s)

    async def _end(self, session_id: str, epoch: int) -> None:
        """Ends an idle session, even if the caller is cancelled. A turn that comes meanwhile finds it ended.

        Raises ControllerError if the ledger could not be told. No replica then holds the session, and the controller
        ends it after its idle timeout.
        """
        self._sessions.drop(session_id)
        ending = self._tasks.start(self._end_dropped(session_id, epoch))
        await self._tasks.outcome(self._ending.put(session_id, ending))

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

    def _free_kv(self, session_id: str) -> Coroutine[Any, Any, None]:
        """Frees the session's KV, see `_freed_by`."""
        return self._freed_by(session_id, lambda: self._engine.close_session(session_id))

    def _freed_by(self, session_id: str, ask: Callable[[], Future[None]]) -> Coroutine[Any, Any, None]:
        """Frees KV. This only frees memory: the engine uses leftover KV only as far as it matches the history. The
        engine is asked at once; awaiting the result waits until it has done it."""
        try:
            return self._freed(session_id, ask())
        except EngineError as error:
            refused: Future[None] = Future()
            refused.set_exception(error)
            return self._freed(session_id, refused)

    async def _freed(self, session_id: str, asked: Future[None]) -> None:
        try:
            await carried_out(asked)
        except SessionBusy:
            logger.warning("session %s: KV still in use", session_id)
        except (EngineError, TimeoutError) as error:
            logger.warning("session %s: KV not freed: %r", session_id, error)
