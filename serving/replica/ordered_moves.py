"""Moves of sessions that an operator orders. A move takes place between two turns and is fenced by the epoch.

Used on the replica's event loop only.
"""

from __future__ import annotations

from controllers.errors import StaleEpoch
from controllers.session import SessionController
from serving.background import BackgroundTasks
from serving.replica.session_host import SessionHost
from serving.wire.calls import MoveSession
from serving.wire.controller_calls import ControllerCalls
from serving.wire.turns import MovedSession


class OrderedMoves:
    """Moves sessions that this replica owns. The host frees what a session leaves behind here."""

    def __init__(
        self,
        replica_id: str,
        host: SessionHost,
        sessions: SessionController,
        controller: ControllerCalls,
        tasks: BackgroundTasks,
    ) -> None:
        self._replica_id = replica_id
        self._host = host
        self._sessions = sessions
        self._controller = controller
        self._tasks = tasks

    async def move(self, order: MoveSession) -> MovedSession:
        """Moves a session. It first waits for a fork of it. Turns that come meanwhile wait, and then find it moved.

        A move that has begun completes even if the caller is cancelled. Raises ControllerError: the session has then
        stayed, unless only the controller's answer was lost."""
        await self._host.hold_unforked(order.session_id, order.epoch)
        if order.to is None and order.epoch > order.found_at:
            return MovedSession(self._replica_id, self._replica_id, order.epoch)
        return await self._host.handed_over(order.session_id, self._tasks.start(self._move(order)))

    async def _move(self, order: MoveSession) -> MovedSession:
        """Without an answer from the controller, the session may have moved. Its epoch then refuses the next turn."""
        session_id, epoch = order.session_id, order.epoch
        kept_away = self._sessions.begin_fork(session_id, epoch, 0)
        moved = False
        try:
            owner = await self._controller.move_session(session_id, epoch, self._replica_id, order.to)
            moved = owner.epoch != epoch
        except StaleEpoch:  # an earlier try of this call moved it
            moved = True
            raise
        finally:
            if moved:
                await self._host.let_go(kept_away)
            else:
                self._sessions.abort_fork(kept_away)
                await self._host.turn_ended(session_id)
        return MovedSession(self._replica_id, owner.replica_id, owner.epoch)
