"""Virtual time: one scheduler over the event loops of all parties, each of which stands for a process.

A party's own callbacks run in the order that asyncio promises. Which party runs next is drawn from the seed, callback
by callback, so anything may happen to the others between two steps of a task. When nobody can run, time jumps to the
next timer. A party that dies keeps its tasks as they are until the world ends: its code never runs again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import events
from collections.abc import Callable
from random import Random
from typing import Any

MOST_STEPS_AT_ONCE = 200_000
"""Callbacks at one moment of virtual time: more are a loop that never waits."""


class Spinning(Exception):
    """Callbacks follow each other without end, and no time passes."""


class World:
    """Owns virtual time, in seconds from 0, and every loop. Not thread safe: there are no threads."""

    def __init__(self, random: Random) -> None:
        self.now_s = 0.0
        self.steps = 0
        self.failures: list[str] = []
        """What nobody caught: each is a fault of the party that it names."""
        self._random = random
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None] | events.TimerHandle]] = []
        self._runnable: list[PartyLoop] = []
        self._loops: list[PartyLoop] = []

    def clock(self) -> float:
        return self.now_s

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Calls `act` then, outside of any party."""
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._numbers), act))

    def run(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Until nobody can run and `done`; False at the deadline. Raises Spinning."""
        at_once = 0
        while True:
            if self._runnable:
                self._step()
                at_once += 1
                if at_once > MOST_STEPS_AT_ONCE:
                    raise Spinning(f"at {self.now_s:.3f} s")
            elif done():
                return True
            elif not self._timers or self._timers[0][0] > deadline_s:
                self.now_s = max(self.now_s, deadline_s)
                return False
            else:
                at_once = 0
                self._pass_time()

    def close(self) -> None:
        """Ends every party; the world cannot go on."""
        for loop in self._loops:
            loop.die()
        self._timers.clear()
        for loop in self._loops:
            loop.bury()

    def begin(self, loop: PartyLoop) -> None:
        self._loops.append(loop)

    def add_timer(self, handle: events.TimerHandle) -> None:
        heapq.heappush(self._timers, (handle.when(), next(self._numbers), handle))

    def can_run(self, loop: PartyLoop) -> None:
        self._runnable.append(loop)

    def cannot_run(self, loop: PartyLoop) -> None:
        if loop in self._runnable:
            self._runnable.remove(loop)

    def _step(self) -> None:
        runnable = self._runnable
        count = len(runnable)
        index = int(self._random.random() * count) if count > 1 else 0
        loop = runnable[index]
        handle = loop.next_handle()
        if not loop.has_work:
            runnable[index] = runnable[-1]
            runnable.pop()
        self.steps += 1
        if not handle.cancelled():
            events._set_running_loop(loop)
            try:
                loop.run_handle(handle)
            finally:
                events._set_running_loop(None)
        loop.stepped()

    def _pass_time(self) -> None:
        when_s, _, what = heapq.heappop(self._timers)
        self.now_s = max(self.now_s, when_s)
        if not isinstance(what, events.TimerHandle):
            what()
        elif not what.cancelled():
            what._loop.due(what)


class PartyLoop(asyncio.BaseEventLoop):
    """The event loop of one party. `fail` hears of what nobody caught."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._frozen = 0
        self._held = False
        self._doom: tuple[int, Callable[[], None]] | None = None
        self._remains: list[Any] = []
        self.dead = False
        super().__init__()
        world.begin(self)

    @property
    def has_work(self) -> bool:
        return bool(self._ready)

    def next_handle(self) -> events.Handle:
        return self._ready.popleft()

    def due(self, handle: events.TimerHandle) -> None:
        if not self.dead:
            self._append(handle)

    def run_handle(self, handle: events.Handle) -> None:
        handle._run()

    def freeze(self) -> None:
        self._frozen += 1
        self._world.cannot_run(self)

    def thaw(self) -> None:
        """As often as it was frozen: then it runs again."""
        self._frozen -= 1
        if self._ready and self._runs and not self.dead:
            self._world.can_run(self)

    def doom(self, steps: int, end: Callable[[], None]) -> None:
        """Calls `end` after so many more callbacks of this party, if it has so many."""
        self._doom = (steps, end)

    def stepped(self) -> None:
        if self._doom is not None:
            steps, end = self._doom
            self._doom = (steps - 1, end) if steps > 0 else None
            if steps <= 0:
                end()

    def die(self) -> None:
        """Nothing of it runs any more, not even what would clean up."""
        if self.dead:
            return
        self._world.cannot_run(self)
        self._remains = [*self._ready, *asyncio.all_tasks(self)]
        self._ready.clear()
        self.dead = True

    def bury(self) -> None:
        """What is left of its tasks is thrown away in silence."""
        for each in self._remains:
            if isinstance(each, asyncio.Task):
                each._log_destroy_pending = False  # type: ignore[attr-defined]
        self._remains.clear()
        self.close()

    def _append(self, handle: events.Handle) -> None:
        if not self._ready and self._runs:
            self._world.can_run(self)
        self._ready.append(handle)

    @property
    def _runs(self) -> bool:
        return not self._frozen and not self._held

    def _hold(self) -> None:
        """What is ready waits until `_release`."""
        self._held = True
        self._world.cannot_run(self)

    def _release(self, first: events.Handle) -> None:
        self._held = False
        self._ready.appendleft(first)
        if self._runs:
            self._world.can_run(self)

    # What asyncio asks of a loop.

    def time(self) -> float:
        return self._world.now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> events.Handle:
        handle = events.Handle(callback, args, self, context)
        if not self.dead:
            self._append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> events.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> events.TimerHandle:
        timer = events.TimerHandle(when, callback, args, self, context)
        self._world.add_timer(timer)
        return timer

    def _timer_handle_cancelled(self, handle: events.TimerHandle) -> None:
        pass

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """On this loop, in a step of its own: there are no threads."""
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
        return False  # nothing of asyncio may take it for a loop that it can stop

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._world.failures.append(
                f"{self._name}: {context.get('message')}: {context.get('exception')!r}"
            )
