"""The turns of sessions that are ending in the background, for which the next turn waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from controllers.turns import Turn
from serving.background import BackgroundTasks, TasksByKey

R = TypeVar("R")


class EndingTurns:
    """Starts the tasks that end turns, and knows them until they are done. Used on the replica's event loop only."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._by_key: TasksByKey[tuple[str, str], Any] = TasksByKey()
        self._left: TasksByKey[str, Any] = TasksByKey()  # by session: its client has left

    def start(self, turn: Turn | None, end: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Starts `end`, for which a turn of the same session and key waits. It goes on if its caller is cancelled."""
        ending = self._tasks.start(end)
        if turn is not None and turn.idempotency_key is not None:
            self._by_key.put((turn.session_id, turn.idempotency_key), ending)
        return ending

    def client_left(self, turn: Turn | None, ending: asyncio.Task[Any]) -> None:
        """Makes any next turn of the session wait for the task that ends this one."""
        if turn is not None and not ending.done():
            self._left.put(turn.session_id, ending)

    async def over(self, session_id: str, key: str | None) -> None:
        """Waits for turns of the session that are ending and must not refuse the next one. One is a turn with the same
        key: it is being committed, and its answer will be replayed. The other is a turn whose client has left: that
        client may be asking again."""
        if key is not None and (same := self._by_key.get((session_id, key))) is not None:
            await asyncio.wait([same])
        if (left := self._left.get(session_id)) is not None:
            await asyncio.wait([left])
