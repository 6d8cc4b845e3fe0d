"""Moves of sessions that an operator orders. A move takes place between two turns and is fenced by the epoch.

Used on the replica's event loop only.
"""

from __future__ import annotations

from controllers.errors import StaleEpoch
from serving.replica.session_host import SessionHost
from serving.wire.calls import MoveSession
from serving.wire.controller_calls import ControllerCalls
from serving.wire.turns import MovedSession


class OrderedMoves:
    """Moves sessions that this replica owns. The host frees what a session leaves behind here."""

    def __init__(self, replica_id: str, host: SessionHost, controller: ControllerCalls) -> None:
        self._replica_id = replica_id
        self._host = host
        self._controller = controller

    async def move(self, order: MoveSession) -> MovedSession:
        """Moves a session. It first waits for a fork of it. Turns that come meanwhile wait, and then find it moved.

        A move that has begun completes even if the caller is cancelled. Raises ControllerError: the session has then
        stayed, unless only the controller's answer was lost."""
        await self._host.hold_unforked(order.session_id, order.epoch)
        if order.to is None and order.epoch > order.found_at:
            return MovedSession(self._replica_id, self._replica_id, order.epoch)
        return await self._host.handed_over(order.session_id, self._move(order))

    async def _move(self, order: MoveSession) -> MovedSession:
        """Without an answer from the controller, the session may have moved. Its epoch then refuses the next turn."""
        session_id, epoch = order.session_id, order.epoch
        async with self._host.kept_still(session_id, epoch) as stay:
            try:
                owner = await self._controller.move_session(session_id, epoch, self._replica_id, order.to)
            except StaleEpoch:  # an earlier try of this call moved it
                stay.moved = True
                raise
            stay.moved = owner.epoch != epoch
        return MovedSession(self._replica_id, owner.replica_id, owner.epoch)
