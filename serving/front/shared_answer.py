"""One answer for many: who asks while it is being found waits for the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from serving.background import BackgroundTasks

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """What `ask` comes to, asked once at a time. It is not kept: who asks later gets a newer one. Whoever stops waiting
    takes it from nobody else."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], tasks: BackgroundTasks) -> None:
        self._ask = ask
        self._tasks = tasks
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Raises what `ask` raises."""
        if self._asking is None or self._asking.done():
            self._asking = self._tasks.start(self._ask())
        return await self._tasks.outcome(self._asking)
