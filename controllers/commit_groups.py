"""Turns on their way into the log, in groups: what arrives while one group is written goes with the next.

So turns share what each would pay alone: a call to the controller, a transaction of the log, a flush of its disk. Group
commit, as in DeWitt et al., "Implementation Techniques for Main Memory Database Systems" (SIGMOD 1984).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from controllers.errors import ControllerError
from controllers.records import TurnRecord

MOST_AT_ONCE = 512
"""Turns of one group, but for those that came together: whoever writes a group does nothing else meanwhile."""

Outcome = ControllerError | None
"""Of one turn: None once the log holds it, else what it was refused with."""

Write = Callable[[Sequence[TurnRecord]], Awaitable[Sequence[Outcome]]]
"""Gives each turn's outcome, in order. What it raises is the outcome of all: nobody knows which of them the log has."""


class CommitGroups:
    """One group is written at a time. Used on one event loop.

    With `patience_s` a group that has no answer for so long holds up the next no longer: both are on their way then.
    """

    def __init__(self, write: Write, *, patience_s: float | None = None) -> None:
        self._write = write
        self._patience_s = patience_s
        self._waiting: deque[tuple[Sequence[TurnRecord], asyncio.Future[Sequence[Outcome]]]] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._groups: set[asyncio.Task[None]] = set()

    @property
    def num_waiting(self) -> int:
        """Turns that no group has taken yet."""
        return sum(len(records) for records, _ in self._waiting)

    async def commit(self, records: Sequence[TurnRecord]) -> Sequence[Outcome]:
        """Each turn's outcome, in order. Whoever leaves takes nothing back. Raises what writing them raised."""
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
        """Takes what is there when it begins, not when it was ordered."""
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
