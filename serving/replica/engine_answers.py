"""How the parts of a replica wait for its engine, which answers between two steps."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

ENGINE_TIMEOUT_S = 10.0
"""How long a replica waits for its engine, whatever it asks."""

T = TypeVar("T")


async def answered(asked: Future[T]) -> T:
    """The engine's answer. Raises EngineError, and TimeoutError after ENGINE_TIMEOUT_S: the engine then need not look
    at it any more."""
    async with asyncio.timeout(ENGINE_TIMEOUT_S):
        return await asyncio.wrap_future(asked)


async def carried_out(asked: Future[T]) -> T:
    """The same for what the engine is to do in any case, even if nobody waits for it any more."""
    async with asyncio.timeout(ENGINE_TIMEOUT_S):
        return await asyncio.shield(asyncio.wrap_future(asked))
