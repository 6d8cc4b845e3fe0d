"""Commits turns in groups: turns that arrive while one group is written form the next.

So turns share the cost of a call to the controller, a transaction of the log and a flush of its disk. This is group
commit, as in DeWitt et al., "Implementation Techniques for Main Memory Database Systems" (SIGMOD 1984).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from controllers.errors import ControllerError
from controllers.records import TurnRecord

MOST_AT_ONCE = 512
"""The most turns in one group: the writer does nothing else meanwhile. Records of one `commit` are never split."""

Outcome = ControllerError | None
"""The outcome of one turn: None if the log holds it, else the error that it was refused with."""

Write = Callable[[Sequence[TurnRecord]], Awaitable[Sequence[Outcome]]]
"""Writes turns and returns their outcomes, in order. If it raises, nobody knows which turns the log holds, and each
waiting `commit` raises that."""


class CommitGroups:
    """Writes one group at a time. Used on one event loop.

    With `patience_s`, the next group is sent once a group has had no answer for that long. Both are then under way.
    """

    def __init__(self, write: Write, *, patience_s: float | None = None) -> None:
        self._write = write
        self._patience_s = patience_s
        self._waiting: deque[tuple[Sequence[TurnRecord], asyncio.Future[Sequence[Outcome]]]] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._groups: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        """How many turns are in no group yet."""
        return sum(len(records) for records, _ in self._waiting)

    async def commit(self, records: Sequence[TurnRecord]) -> Sequence[Outcome]:
        """Commits turns and returns their outcomes, in order. Raises what writing them raised. If the caller is
        cancelled, the turns are still written."""
        answer: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self._waiting.append((records, answer))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        return await answer

    async def _write_all(self) -> None:
        while self._waiting:
            group = asyncio.create_task(self._write_next())
            self._groups.add(group)
            group.add_done_callback(self._groups.discard)
            await asyncio.wait([group], timeout=self._patience_s)
        self._writer = None

    async def _write_next(self) -> None:
        """Writes one group of the turns that wait when this begins to run, not when it was scheduled."""
        parts = [self._waiting.popleft()]
        records = list(parts[0][0])
        while self._waiting and len(records) + len(self._waiting[0][0]) <= MOST_AT_ONCE:
            parts.append(self._waiting.popleft())
            records += parts[-1][0]
        try:
            outcomes = await self._write(records)
        except Exception as error:
            for _, answer in parts:
                if not answer.done():
                    answer.set_exception(error)
            return
        at = 0
        for own, answer in parts:
            if not answer.done():
                answer.set_result(outcomes[at : at + len(own)])
            at += len(own)
