"""One answer for many: who asks while it is being found waits for the same, and who asks soon after gets it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from serving.background import BackgroundTasks

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """What `ask` comes to. It is asked once at a time, and its answer is kept for `kept_s`; an error is not. Whoever
    stops waiting takes it from nobody else. `clock` returns monotonic seconds."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[T]],
        tasks: BackgroundTasks,
        *,
        kept_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._tasks = tasks
        self._kept_s = kept_s
        self._clock = clock
        self._asking: asyncio.Task[T] | None = None
        self._asked_s = 0.0

    async def get(self) -> T:
        """Raises what `ask` raises."""
        if self._asking is None or self._is_over(self._asking):
            self._asked_s = self._clock()
            self._asking = self._tasks.start(self._answer())
        return await self._tasks.outcome(self._asking)

    def _is_over(self, asking: asyncio.Task[T]) -> bool:
        if not asking.done():
            return False
        failed = asking.cancelled() or asking.exception() is not None
        return failed or self._clock() - self._asked_s > self._kept_s

    async def _answer(self) -> T:
        return await self._ask()
