"""Planted faults of one replica: in its KV books, its engine, its sessions. Each is undone after a time, or when asked.

Only this file reaches into private parts of others, on purpose: a fault is something that no interface allows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cache.journal import Holder
from cache.sequence_kv import SequenceKV
from cache.session_cache import SessionAwareCache
from cache.slots import SlotState
from engine.api import EngineOverloaded, GenerateRequest, StepFailed
from serving.background import BackgroundTasks
from serving.debug.kinds import FaultKind
from serving.wire.calls import PlantFault
from serving.wire.turns import ErrorInfo, ServiceError

T = TypeVar("T")
Undo = Callable[[], Awaitable[None]]

ENGINE_TIMEOUT_S = 10.0
BY = "debug.faults"
TWIN_KEY = -1
"""The key under which the twin of a doubly counted page is kept. The tiers' own keys begin at 1."""
PLANTED = f"planted by {BY}"


class ReplicaFaults:
    """Used only on the replica's event loop; `engine` is a LocalEngine, `host` the SessionHost, `heartbeats` the
    Heartbeats. Damage to the books is done on the engine's thread, between two steps. There is at most one fault of
    each kind."""

    def __init__(self, engine: Any, host: Any, heartbeats: Any, tasks: BackgroundTasks) -> None:
        self._engine = engine
        self._host = host
        self._heartbeats = heartbeats
        self._tasks = tasks
        self._undo: dict[FaultKind, tuple[Undo, asyncio.TimerHandle]] = {}

    async def plant(self, order: PlantFault) -> dict[str, Any]:
        """Plants a fault and returns it, JSON ready. Without a kind all faults are undone. Raises ServiceError."""
        if order.kind is None:
            mended = list(self._undo)
            for kind in mended:
                await self._mend(kind)
            return {"mended": [kind.value for kind in mended]}
        kind = FaultKind(order.kind)
        await self._mend(kind)
        undo, planted = await self._planted(kind, order)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(order.for_s, lambda: self._tasks.start(self._mend(kind)))
        self._undo[kind] = undo, timer
        return {"kind": kind.value, "for_s": order.for_s, **planted}

    async def _mend(self, kind: FaultKind) -> None:
        planted = self._undo.pop(kind, None)
        if planted is not None:
            undo, timer = planted
            timer.cancel()
            await undo()

    async def _planted(self, kind: FaultKind, order: PlantFault) -> tuple[Undo, dict[str, Any]]:
        match kind:
            case FaultKind.LEAK_PAGE:
                return await self._leak(order.session_id)
            case FaultKind.DOUBLE_COUNT:
                return await self._count_twice(order.session_id)
            case FaultKind.LOSE_SESSION:
                return await self._lose(order.session_id)
            case FaultKind.REFUSE_TURNS:
                return self._refuse(EngineOverloaded(PLANTED)), {}
            case FaultKind.FAIL_TURNS:
                return self._refuse(StepFailed(PLANTED)), {}
            case FaultKind.SLOW_STEPS:
                return self._slow_down(order.delay_s), {"delay_s": order.delay_s}
            case FaultKind.STALL_ENGINE:
                return self._stall(order.for_s), {}
            case FaultKind.STOP_HEARTBEATS:
                return self._fall_silent(), {}
            case FaultKind.SLOW_COMMITS | FaultKind.FAIL_COMMITS:
                raise AssertionError(f"{kind} is planted in the controller")

    async def _on_step_thread(self, operation: Callable[[SessionAwareCache], T]) -> T:
        cache: SessionAwareCache = self._engine._cache
        async with asyncio.timeout(ENGINE_TIMEOUT_S):
            return await asyncio.wrap_future(self._engine._call(lambda: operation(cache)))

    async def _leak(self, session_id: str | None) -> tuple[Undo, dict[str, Any]]:
        """Takes a page for a session without giving it to the session, as if the caller had lost it."""

        def take(cache: SessionAwareCache) -> tuple[str, Any, Holder]:
            name, kv = _idle_session(cache, session_id)
            holder = Holder(name, BY)
            pages = cache._inner.allocator.allocate(1, kv.last_page, holder)
            if pages is None:
                raise _refused("no page is free")
            return name, pages, holder

        name, pages, holder = await self._on_step_thread(take)

        async def give_back() -> None:
            await self._on_step_thread(lambda cache: cache._inner.allocator.free(pages, holder))

        return give_back, {"session_id": name, "page": int(pages[0])}

    async def _count_twice(self, session_id: str | None) -> tuple[Undo, dict[str, Any]]:
        """Gives a page of a session to a second account."""

        def add(cache: SessionAwareCache) -> tuple[str, SequenceKV]:
            name, kv = _idle_session(cache, session_id)
            twin = SequenceKV(cache.empty_chain(""), cache._account, windowed=cache._inner.window is not None)
            twin.holder = Holder(None, BY)
            twin.grow(kv.pages[-1:].copy(), kv.page_size)
            cache.tiers._orphans[TWIN_KEY] = twin
            return name, twin

        name, twin = await self._on_step_thread(add)

        async def remove() -> None:
            def forget(cache: SessionAwareCache) -> None:
                cache.tiers._orphans.pop(TWIN_KEY, None)
                twin.account.full -= twin.num_pages

            await self._on_step_thread(forget)

        return remove, {"session_id": name, "page": twin.last_page}

    async def _lose(self, session_id: str | None) -> tuple[Undo, dict[str, Any]]:
        """The replica forgets a session without telling anybody; its KV stays. The next turn loads the session
        again."""
        name, _ = await self._on_step_thread(lambda cache: _idle_session(cache, session_id))
        epoch = self._host._sessions.epoch(name)
        if epoch is None:
            raise _refused(f"session {name} is not held here")
        self._host._sessions._sessions.pop(name)  # directly, so that no change is noted

        async def load_again() -> None:
            await self._host.hold(name, epoch)

        return load_again, {"session_id": name}

    def _refuse(self, error: Exception) -> Undo:
        def submit(_request: GenerateRequest) -> None:
            raise error

        self._engine.submit = submit

        async def undo() -> None:
            self._engine.__dict__.pop("submit", None)

        return undo

    def _slow_down(self, delay_s: float) -> Undo:
        slowed = _SlowRunner(self._engine._runner, delay_s)
        self._engine._runner = slowed

        async def undo() -> None:
            self._engine._runner = slowed.runner

        return undo

    def _stall(self, for_s: float) -> Undo:
        """Makes one step take `for_s`."""
        over = threading.Event()
        self._engine._post(lambda: over.wait(for_s))

        async def undo() -> None:
            over.set()

        return undo

    def _fall_silent(self) -> Undo:
        self._heartbeats._left = True

        async def undo() -> None:
            self._heartbeats._left = False

        return undo


class _SlowRunner:
    """A runner whose steps each begin `delay_s` later."""

    def __init__(self, runner: Any, delay_s: float) -> None:
        self.runner = runner
        self._delay_s = delay_s

    def launch(self, batch: Any) -> Any:
        time.sleep(self._delay_s)
        return self.runner.launch(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def _idle_session(cache: SessionAwareCache, session_id: str | None) -> tuple[str, SequenceKV]:
    """The named session, or the first idle one; its KV is on the device. Raises ServiceError if there is none."""
    for slot in cache._slots:
        wanted = session_id is None or slot.session_id == session_id
        if wanted and slot.state is SlotState.IDLE and slot.kv is not None and slot.kv.num_pages:
            return slot.session_id, slot.kv
    raise _refused(
        "no idle session has KV on this replica: take a turn first"
        if session_id is None
        else f"session {session_id} has no KV on this replica, or is in a turn"
    )


def _refused(message: str) -> ServiceError:
    return ServiceError(ErrorInfo(409, "nothing_to_damage", message, "session_id"))
