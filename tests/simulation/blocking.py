"""The loop of a party whose code waits for others in the midst of a callback, as a client of Redis waits at its socket.

Each callback runs in a greenlet. While it waits nothing else of its party runs, and all others go on.
"""

from __future__ import annotations

from asyncio import events
from typing import Any

from greenlet import greenlet

from tests.simulation.loop import PartyLoop, World


class BlockingLoop(PartyLoop):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._callback: greenlet | None = None
        self._waits = 0

    def run_handle(self, handle: events.Handle) -> None:
        if isinstance(handle, _Resumption):
            handle._run()
            return
        self._callback = greenlet(handle._run)
        self._callback.switch()

    def block(self, timeout_s: float) -> None:
        """Stops the callback that calls it until `unblock`, for so long at most."""
        self._waits += 1
        number = self._waits
        self._hold()
        self._world.after(timeout_s, lambda: self._unblock(number))
        task = greenlet.getcurrent().parent
        assert task is not None
        task.switch()

    def unblock(self) -> None:
        """Does nothing if it does not wait."""
        self._unblock(self._waits)

    def bury(self) -> None:
        callback, self._callback = self._callback, None
        if callback:
            callback.throw()
        super().bury()

    def _unblock(self, number: int) -> None:
        if self.dead or number != self._waits or not self._held:
            return
        assert self._callback is not None
        self._release(_Resumption(self._callback, self))


class _Resumption(events.Handle):
    """Goes on with a callback where it stopped."""

    def __init__(self, callback: greenlet, loop: BlockingLoop) -> None:
        super().__init__(callback.switch, (), loop)

    def _run(self) -> Any:
        self._callback()
