"""Closes sessions whose first turn came to nothing, so that nothing of them is left, not even their KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.front.api.service import TurnService
from serving.wire.errors import ANOTHERS_TURN
from serving.wire.turns import ServiceError, TurnCall, TurnEvent

FINISHED_TURNS = 1
_CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@asynccontextmanager
async def run_first_turn(service: TurnService, call: TurnCall) -> AsyncIterator[AsyncIterator[TurnEvent]]:
    """Runs the turn. If it is refused, aborted or left early, its session is closed."""
    committed = is_anothers = False

    async def watched(events: AsyncIterator[TurnEvent]) -> AsyncIterator[TurnEvent]:
        nonlocal committed
        async for event in events:
            committed = event.is_committed
            yield event

    try:
        async with service.run(call) as events:
            yield watched(events)
    except ServiceError as error:
        is_anothers = error.info.code in ANOTHERS_TURN
        raise
    finally:
        if not (committed or is_anothers):
            await close_unused(service, call)


async def close_unused(service: TurnService, call: TurnCall) -> None:
    """Closes the call's session, if it exists and has no turn."""
    assert call.session is not None
    session_id = call.session.session_id
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            session = await service.session(session_id, tenant=call.tenant)
            if session is not None and session.turns < FINISHED_TURNS:
                await service.close_session(session_id, tenant=call.tenant)
    except (ServiceError, TimeoutError) as error:
        logger.info("the session of request %s is left to its idle timeout: %r", call.request_id, error)
