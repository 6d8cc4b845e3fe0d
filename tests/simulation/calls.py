"""A call from one party to a method of another party's actor, as Ray and gRPC carry it: one answer or a stream of
items.

If one end dies, the other end learns of it later. When a caller cancels, the far end is cancelled once word arrives.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
from collections import deque
from collections.abc import Callable, Generator
from operator import attrgetter
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from tests.simulation.network import Network, Party, copied

REPEATED = frozenset(
    f"actor.{method}"
    for method in (
        "commit_turns",
        "offer_session",
        "move_session",
        "report_unreachable",
        "deregister_replica",
        "resolve",
    )
)
"""Calls that may be carried out twice. Ray repeats them if a controller dies before it answers."""
UNAVAILABLE = "the connection broke"


def unavailable() -> Exception:
    return ActorUnavailableError(UNAVAILABLE, None)


def died() -> Exception:
    return ActorDiedError()


def raised_there(error: BaseException) -> Exception:
    """A method's error as Ray passes it to the caller."""
    task_error = RayTaskError("method", repr(error), error, "party", 1, "127.0.0.1")
    return task_error.as_instanceof_cause()


class FarCall:
    """The far end's half of a call. Runs the method there. Is cancelled if the caller cancels or dies."""

    def __init__(self, party: Party, run: Callable[[], Any]) -> None:
        self._party = party
        self._run = run
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def begin(self) -> None:
        if not self._cancelled:
            self._task = self._party.loop.create_task(self._run())

    def cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


class Call:
    """A call with one answer. It is made on the caller's loop; `answer` is the caller's future. `method` is a path that
    begins at the target party.

    Serve may send a request again while the first is still in progress. Then the answer to the second counts.
    """

    def __init__(self, network: Network, caller: Party, method: str, args: tuple[Any, ...]) -> None:
        self._network = network
        self._caller = caller
        self._method = method
        self._request = copied(args)
        self._far: list[FarCall] = []
        self._target: Party | None = None
        self.answer: asyncio.Future[Any] = caller.loop.create_future()
        self.answer.add_done_callback(self._ended)

    def __await__(self) -> Generator[Any, None, Any]:
        return self.answer.__await__()

    @property
    def over(self) -> bool:
        return self.answer.done() or self._caller.dead

    def send(self, target: Party) -> None:
        self._target = target
        target.calls[self] = self._caller.calls[self] = None
        if self._method in REPEATED and self._network.chance(self._network.weather.repeats):
            self._send_once(target, takes_answer=False)
        self._send_once(target, takes_answer=True)

    def is_answered_there(self, party: Party) -> bool:
        return party is self._target

    def party_died(self, party: Party) -> None:
        if party is self._caller:
            self._cancel_far()
        elif not self.over:
            self._target_died()

    def cancel(self) -> None:
        if not self.answer.done():
            self.answer.cancel()
            self._cancel_far()

    def fail(self, error: Exception) -> None:
        """Fails the call. Runs on the caller's loop."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def _send_once(self, target: Party, *, takes_answer: bool) -> None:
        async def run() -> None:
            try:
                result = await attrgetter(self._method)(target)(*pickle.loads(self._request))
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._reply(target, error, None, takes_answer=takes_answer)
            else:
                self._reply(target, None, copied(result), takes_answer=takes_answer)

        far = FarCall(target, run)
        self._far.append(far)
        self._network.send(self._caller, target, far.begin, self._broke)

    def _reply(
        self, target: Party, error: Exception | None, result: bytes | None, *, takes_answer: bool
    ) -> None:
        if not takes_answer:
            return

        def arrive() -> None:
            if self.answer.done():
                return
            if error is not None:
                self.answer.set_exception(raised_there(pickle.loads(copied(error))))
            else:
                assert result is not None
                self.answer.set_result(pickle.loads(result))

        self._network.send(target, self._caller, arrive, self._broke)

    def _broke(self) -> None:
        """The connection broke. The caller learns of it, and so does the far end if it lives."""
        if not self._caller.dead:
            self._caller.loop.call_soon(self.fail, unavailable())
        self._cancel_far()

    def _target_died(self) -> None:
        error = died() if self._network.chance(0.5) else unavailable()
        world, loop = self._caller.world, self._caller.loop
        world.after(self._network.break_s(), lambda: loop.call_soon(self.fail, error))

    def _cancel_far(self) -> None:
        """The far end learns of it after the network's delay."""
        target = self._target
        if target is None or target.dead:
            return

        def cancel() -> None:
            for far in self._far:
                target.loop.call_soon(far.cancel)

        target.world.after(self._network.delay_s(), cancel)

    def _ended(self, answer: asyncio.Future[Any]) -> None:
        """Reads the answer's error, so that asyncio does not report an answer that nobody waits for any more."""
        if not answer.cancelled():
            answer.exception()
        self._caller.calls.pop(self, None)
        if self._target is not None:
            self._target.calls.pop(self, None)


class Stream:
    """A call with a stream of items, in the order in which they were sent. It ends as the far end's generator does, or
    raises what breaks it."""

    def __init__(self, network: Network, caller: Party, method: str, args: tuple[Any, ...]) -> None:
        self._network = network
        self._caller = caller
        self._method = method
        self._request = copied(args)
        self._far: FarCall | None = None
        self._target: Party | None = None
        self._arrived: dict[int, Callable[[], Any]] = {}
        self._next = 0
        self._waiting: deque[Callable[[], Any]] = deque()
        self._wakes = asyncio.Event()
        self._ended = False

    def send(self, target: Party) -> None:
        self._target = target
        self._far = FarCall(target, self._run)
        target.calls[self] = self._caller.calls[self] = None
        self._network.send(self._caller, target, self._far.begin, self._broke)

    @property
    def over(self) -> bool:
        return self._ended or self._caller.dead

    def cancel(self) -> None:
        target, far = self._target, self._far
        if target is not None and far is not None and not target.dead:
            target.world.after(self._network.delay_s(), lambda: target.loop.call_soon(far.cancel))
        self._end()

    def is_answered_there(self, party: Party) -> bool:
        return party is self._target

    def party_died(self, party: Party) -> None:
        if party is self._caller:
            self.cancel()
        elif not self.over:
            world, loop = self._caller.world, self._caller.loop
            world.after(self._network.break_s(), lambda: loop.call_soon(self.fail, died()))

    def fail(self, error: Exception) -> None:
        def give() -> Any:
            raise error

        if not self._ended:
            self._end()
            self._waiting.append(give)
            self._wakes.set()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        while not self._waiting:
            self._wakes.clear()
            await self._wakes.wait()
        return self._waiting.popleft()()

    async def _run(self) -> None:
        number, last_s = 0, 0.0
        target = self._target
        assert target is not None

        def post(give: Callable[[], Any]) -> None:
            nonlocal number, last_s
            mine, number = number, number + 1
            last_s = self._network.send(
                target, self._caller, lambda: self._arrive(mine, give), self._broke, not_before_s=last_s
            )

        try:
            items = attrgetter(self._method)(target)(*pickle.loads(self._request))
            assert inspect.isasyncgen(items)
            async for item in items:
                post(_loads(copied(item)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            post(_raises(raised_there(error)))
        else:
            post(_raises(StopAsyncIteration()))

    def _arrive(self, number: int, give: Callable[[], Any]) -> None:
        if self._ended:
            return
        self._arrived[number] = give
        while (ready := self._arrived.pop(self._next, None)) is not None:
            self._next += 1
            self._waiting.append(ready)
            self._wakes.set()

    def _broke(self) -> None:
        if not self._caller.dead:
            self._caller.loop.call_soon(self.fail, unavailable())
        if not self._ended:
            target, far = self._target, self._far
            if target is not None and far is not None and not target.dead:
                target.loop.call_soon(far.cancel)

    def _end(self) -> None:
        self._ended = True
        self._caller.calls.pop(self, None)
        if self._target is not None:
            self._target.calls.pop(self, None)


def _loads(data: bytes) -> Callable[[], Any]:
    return lambda: pickle.loads(data)


def _raises(error: BaseException) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give
