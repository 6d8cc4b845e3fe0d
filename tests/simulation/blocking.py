"""The loop of a party whose code blocks inside a callback, as a client of Redis blocks at its socket.

Each callback runs in a greenlet. While a callback blocks, nothing else of its party runs; all other parties go on.
"""

from __future__ import annotations

from greenlet import greenlet

from tests.simulation.loop import Callback, PartyLoop, World


class BlockingLoop(PartyLoop):
    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._callback: greenlet | None = None
        self._waits = 0

    def run_callback(self, callback: Callback) -> None:
        if isinstance(callback, _Resumption):
            callback.run()
            return
        self._callback = greenlet(callback.run)
        self._callback.switch()

    def block(self, timeout_s: float) -> None:
        """Stops the callback that calls it until `unblock`, or for `timeout_s` at most."""
        self._waits += 1
        number = self._waits
        self._hold()
        self._world.after(timeout_s, lambda: self._unblock(number))
        task = greenlet.getcurrent().parent
        assert task is not None
        task.switch()

    def unblock(self) -> None:
        """Lets the stopped callback go on. Does nothing if no callback is stopped."""
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


class _Resumption(Callback):
    """Continues a callback where it stopped."""

    __slots__ = ("_stopped",)

    def __init__(self, stopped: greenlet, loop: BlockingLoop) -> None:
        super().__init__(loop, stopped.switch, (), None)
        self._stopped = stopped

    def run(self) -> None:
        self._stopped.switch()
