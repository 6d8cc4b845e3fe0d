"""Virtual time: one scheduler over the event loops of all parties. Each party stands for a process.

A party's own callbacks run in the order that asyncio promises. Which party runs next is drawn from the seed for each
callback, so anything may happen to the others between two steps of a task. When no party can run, time jumps to the
next timer. A party that dies keeps its tasks as they are until the world ends. Its code never runs again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from random import Random
from typing import Any

MOST_STEPS_AT_ONCE = 200_000
"""The most callbacks at one moment of virtual time. More means a loop that never waits."""


class Spinning(Exception):
    """Callbacks follow each other without end, and no time passes."""


class Callback:
    """A lean replacement for asyncio's Handle and TimerHandle, without debug mode. A run spends most time here."""

    __slots__ = ("_args", "_callback", "_context", "_is_cancelled", "_when_s", "loop")

    def __init__(
        self,
        loop: PartyLoop,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context | None,
        when_s: float = 0.0,
    ) -> None:
        self.loop = loop
        self._callback: Callable[..., Any] | None = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._when_s = when_s
        self._is_cancelled = False

    def when(self) -> float:
        return self._when_s

    def cancel(self) -> None:
        """Cancels the callback and drops the references to its function and arguments."""
        self._is_cancelled = True
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        return self._is_cancelled

    def run(self) -> None:
        """Runs the callback. Raises only SystemExit and KeyboardInterrupt; the loop gets all other errors."""
        callback = self._callback
        if callback is None:
            return
        try:
            self._context.run(callback, *self._args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.loop.call_exception_handler({"message": f"exception in {callback!r}", "exception": error})


class World:
    """Owns virtual time, in seconds from 0, and every loop. It has no threads and is not thread safe."""

    def __init__(self, random: Random) -> None:
        self.now_s = 0.0
        self.steps = 0
        self.failures: list[str] = []
        """Errors that nobody caught. Each is a fault of the party that it names."""
        self._random = random
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None] | Callback]] = []
        self._runnable: list[PartyLoop] = []
        self._loops: list[PartyLoop] = []
        self._inside: PartyLoop | None = None

    def clock(self) -> float:
        return self.now_s

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Calls `act` after `delay_s`, outside of any party."""
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._numbers), act))

    def run(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Runs until no party can run and `done` is true. Returns False at the deadline. Raises Spinning."""
        try:
            while True:
                self._run_at_once()
                if done():
                    return True
                if not self._timers or self._timers[0][0] > deadline_s:
                    self.now_s = max(self.now_s, deadline_s)
                    return False
                self._pass_time()
        finally:
            self._enter(None)

    def close(self) -> None:
        """Ends every party. The world cannot go on after that."""
        for loop in self._loops:
            loop.die()
        self._timers.clear()
        for loop in self._loops:
            loop.bury()

    def begin(self, loop: PartyLoop) -> None:
        self._loops.append(loop)

    def add_timer(self, when_s: float, timer: Callback) -> None:
        heapq.heappush(self._timers, (when_s, next(self._numbers), timer))

    def can_run(self, loop: PartyLoop) -> None:
        self._runnable.append(loop)

    def cannot_run(self, loop: PartyLoop) -> None:
        if loop in self._runnable:
            self._runnable.remove(loop)

    def _run_at_once(self) -> None:
        """Runs everything that can run before time passes."""
        at_once = 0
        while self._runnable:
            self._step()
            at_once += 1
            if at_once > MOST_STEPS_AT_ONCE:
                raise Spinning(f"at {self.now_s:.3f} s")

    def _step(self) -> None:
        runnable = self._runnable
        count = len(runnable)
        index = int(self._random.random() * count) if count > 1 else 0
        loop = runnable[index]
        callback = loop.ready.popleft()
        if not loop.ready:
            runnable[index] = runnable[-1]
            runnable.pop()
        self.steps += 1
        if not callback.cancelled():
            self._enter(loop)
            loop.run_callback(callback)
        if loop.doomed:
            self._enter(None)
            loop.stepped()

    def _enter(self, loop: PartyLoop | None) -> None:
        """Sets the party whose code runs now; None for code outside of all parties."""
        if loop is not self._inside:
            self._inside = loop
            events._set_running_loop(loop)

    def _pass_time(self) -> None:
        when_s, _, what = heapq.heappop(self._timers)
        if when_s > self.now_s:
            self.now_s = when_s
        if not isinstance(what, Callback):
            self._enter(None)
            what()
        elif not what.cancelled():
            what.loop.due(what)


class PartyLoop(asyncio.BaseEventLoop):
    """The event loop of one party. Errors that nobody caught go to the world's `failures`."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._frozen = 0
        self._held = False
        self._doom: tuple[int, Callable[[], None]] | None = None
        self._remains: list[Any] = []
        self.dead = False
        self.ready: deque[Callback] = deque()
        """Callbacks that wait to run here, in order."""
        super().__init__()
        world.begin(self)

    @property
    def doomed(self) -> bool:
        return self._doom is not None

    def due(self, callback: Callback) -> None:
        """Queues a callback that may run now. Does nothing if the party is dead."""
        if self.dead:
            return
        if not self.ready and self._runs:
            self._world.can_run(self)
        self.ready.append(callback)

    def run_callback(self, callback: Callback) -> None:
        callback.run()

    def freeze(self) -> None:
        self._frozen += 1
        self._world.cannot_run(self)

    def thaw(self) -> None:
        """Undoes one `freeze`. The party runs again when each freeze has been undone."""
        self._frozen -= 1
        if self.ready and self._runs and not self.dead:
            self._world.can_run(self)

    def doom(self, steps: int, end: Callable[[], None]) -> None:
        """Calls `end` after `steps` more callbacks of this party, if that many come."""
        self._doom = (steps, end)

    def stepped(self) -> None:
        if self._doom is not None:
            steps, end = self._doom
            self._doom = (steps - 1, end) if steps > 0 else None
            if steps <= 0:
                end()

    def die(self) -> None:
        """Stops the party. Nothing of it runs any more, not even cleanup."""
        if self.dead:
            return
        self._world.cannot_run(self)
        self._remains = [*self.ready, *asyncio.all_tasks(self)]
        self.ready.clear()
        self.dead = True

    def bury(self) -> None:
        """Throws away what is left of its tasks, without warnings."""
        for each in self._remains:
            if isinstance(each, asyncio.Task):
                each._log_destroy_pending = False  # type: ignore[attr-defined]
        self._remains.clear()
        self.close()

    @property
    def _runs(self) -> bool:
        return not self._frozen and not self._held

    def _hold(self) -> None:
        """Makes the ready callbacks wait until `_release`."""
        self._held = True
        self._world.cannot_run(self)

    def _release(self, first: Callback) -> None:
        self._held = False
        self.ready.appendleft(first)
        if self._runs:
            self._world.can_run(self)

    # The methods that asyncio requires of a loop.

    def time(self) -> float:
        return self._world.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Callback:
        soon = Callback(self, callback, args, context)
        self.due(soon)
        return soon

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Callback:
        timer = Callback(self, callback, args, context, when)
        self._world.add_timer(when, timer)
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Callback:
        return self.call_at(self._world.now_s + delay, callback, *args, context=context)

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Runs `func` on this loop in a step of its own, because there are no threads."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(run)
        return future

    def is_running(self) -> bool:
        return False  # keeps asyncio from treating this loop as one that it can stop

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._world.failures.append(
                f"{self._name}: {context.get('message')}: {context.get('exception')!r}"
            )
