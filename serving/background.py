"""Background tasks that outlive the call that started them, and loops. All of them end with their owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

K = TypeVar("K")
T = TypeVar("T")


class BackgroundTasks:
    """Holds tasks until they are done, logs failures that no caller waits for, and stops the tasks within a bound."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], int] = {}  # how many wait for its outcome
        self._loops: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts work that should complete even if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks[task] = 0
        task.add_done_callback(self._done)
        return task

    async def outcome(self, task: asyncio.Task[T]) -> T:
        """Waits for started work and returns its result, or raises its error. The work goes on if the caller is
        cancelled."""
        if task.done():
            return task.result()
        self._tasks[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            if task in self._tasks:
                self._tasks[task] -= 1

    def every(self, interval_s: float, work: Callable[[], Awaitable[None]], *, timeout_s: float) -> None:
        """Repeats `work`, each run bounded by `timeout_s`. A failed run is logged; the loop goes on."""
        task = asyncio.create_task(_repeat(interval_s, work, timeout_s))
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)

    async def stop(self, timeout_s: float) -> None:
        """Cancels the loops, lets the work finish for `timeout_s`, then cancels what is left."""
        for loop in list(self._loops):
            loop.cancel()
        if self._tasks:
            _, late = await asyncio.wait(list(self._tasks), timeout=timeout_s)
            for task in late:
                task.cancel()
        if left := [*self._tasks, *self._loops]:
            await asyncio.wait(left, timeout=timeout_s)

    def _done(self, task: asyncio.Task[Any]) -> None:
        waiting = self._tasks.pop(task)
        if not waiting and not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background work failed", exc_info=error)


class TasksByKey(Generic[K, T]):
    """Tasks under way, by key. Each is forgotten once it is done."""

    def __init__(self) -> None:
        self._tasks: dict[K, asyncio.Task[T]] = {}

    def get(self, key: K) -> asyncio.Task[T] | None:
        return self._tasks.get(key)

    def put(self, key: K, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Keeps the task under `key`, and returns it."""
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._forget(key, task))
        return task

    def _forget(self, key: K, task: asyncio.Task[T]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]


async def _repeat(interval_s: float, work: Callable[[], Awaitable[None]], timeout_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        try:
            async with asyncio.timeout(timeout_s):
                await work()
        except Exception as error:
            logger.warning("%s failed: %r", getattr(work, "__qualname__", "periodic work"), error)
