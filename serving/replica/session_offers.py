"""SessionOffers: asks the controller whether another replica takes a session that is here."""

from __future__ import annotations

import asyncio
import logging
from enum import Enum, auto

from controllers.errors import StaleEpoch
from controllers.session_keys import id_in, tenant_in
from serving.logs.audit_log import audit_event
from serving.wire.controller_calls import ControllerCalls

logger = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 1.0
"""The longest that a turn waits while its session is offered to other replicas, also if the controller is away."""


class Offered(Enum):
    """What came of a session that was offered to other replicas. NO_ANSWER: it is not known; the session may have
    moved, and its epoch then refuses the next turn."""

    MOVED = auto()
    NO_TAKER = auto()
    NO_ANSWER = auto()


class SessionOffers:
    """Offers this replica's sessions. Whoever offers one keeps its turns away meanwhile. Used on the replica's event
    loop only."""

    def __init__(self, replica_id: str, controller: ControllerCalls) -> None:
        self._replica_id = replica_id
        self._controller = controller
        self._crowded = [False] * len(controller.shards)

    def crowded(self, shard: int, crowded: bool) -> None:
        """Notes whether the shard asks that sessions of which a turn begins are offered."""
        self._crowded[shard] = crowded

    def asked_for(self, session_id: str) -> bool:
        """Whether the session's shard finds this replica crowded."""
        return self._crowded[self._controller.shard_of(session_id)]

    async def offer(self, session_id: str, epoch: int) -> Offered:
        try:
            async with asyncio.timeout(OFFER_TIMEOUT_S):
                moved = await self._controller.offer_session(session_id, epoch, self._replica_id)
        except StaleEpoch:  # an earlier try of this call moved it
            moved = True
        except Exception as error:  # typed, in transport, or in the controller itself
            logger.warning("session %s: not offered to others: %r", session_id, error)
            # until the controller says so again, so that no other turn waits in vain
            self._crowded[self._controller.shard_of(session_id)] = False
            return Offered.NO_ANSWER
        if not moved:
            return Offered.NO_TAKER
        audit_event("session_moved", session_id=id_in(session_id), tenant=tenant_in(session_id), epoch=epoch)
        return Offered.MOVED
