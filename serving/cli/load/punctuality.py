"""Measures whether the client was on time. A starved client reads late and sees bursts that the server never sent."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

_PERIOD_S = 0.005


class Punctuality:
    """While its block runs, wakes every few milliseconds and notes how late it was.

    A wake-up alone may be a millisecond late, since event loops round timers up.
    """

    def __init__(self) -> None:
        self.lateness_s: list[float] = []

    async def __aenter__(self) -> Punctuality:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            due_s = time.perf_counter() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self.lateness_s.append(time.perf_counter() - due_s)
