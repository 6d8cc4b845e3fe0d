"""What drives an engine's step loop: in production a thread of its own."""

from __future__ import annotations

import threading
from typing import Protocol


class StepLoop(Protocol):
    """An engine's loop, cranked by one driver."""

    def crank(self, *, wait: bool) -> bool:
        """Takes commands in and makes a step. `wait`: if there is no work, waits for a command first. False: this was
        the last crank."""

    @property
    def idle(self) -> bool:
        """Whether a crank would find nothing to do until the next `wake`."""


class StepDriver(Protocol):
    """Cranks one loop from `start` on until a crank was the last."""

    def start(self, loop: StepLoop) -> None: ...

    def wake(self) -> None:
        """Tells the driver that a command was posted or a copy has ended. May be called from any thread, also before
        the start."""

    def join(self, timeout_s: float) -> None:
        """Waits until the last crank is done. Raises TimeoutError."""

    @property
    def started(self) -> bool: ...

    @property
    def alive(self) -> bool:
        """Whether the loop is being driven."""


class StepThread:
    """A StepDriver that is a thread. `wake` does nothing: the loop itself waits for commands."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, loop: StepLoop) -> None:
        def run() -> None:
            while loop.crank(wait=True):
                pass

        self._thread = threading.Thread(target=run, name="kedge-engine", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        pass

    def join(self, timeout_s: float) -> None:
        assert self._thread is not None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout_s} s")

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()
