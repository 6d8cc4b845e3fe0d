"""One answer for many callers: whoever asks while the answer is being computed waits for the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from serving.background import BackgroundTasks

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """The result of `ask`, which runs once at a time. The result is not kept: a later caller gets a newer one. A caller
    that stops waiting does not cancel it for the others."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], tasks: BackgroundTasks) -> None:
        self._ask = ask
        self._tasks = tasks
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """The answer. Raises what `ask` raises."""
        if self._asking is None or self._asking.done():
            self._asking = self._tasks.start(self._ask())
        return await self._tasks.outcome(self._asking)
