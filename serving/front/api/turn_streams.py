"""Runs the turns of one HTTP request: one or several at once, streamed or collected, while its client listens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace
from starlette.types import Receive

from serving.front.api.errors import ClientGone
from serving.front.api.field_names import OWN_NAMES, FieldNames
from serving.wire.turn_events import merge_events
from serving.wire.turns import (
    ErrorInfo,
    ServiceError,
    TurnCall,
    TurnEvent,
)

T = TypeVar("T")


class RunsTurns(Protocol):
    """The part of a TurnService that runs turns. Others implement it to repeat the events of a turn that runs elsewhere
    or has ended."""

    def run(self, call: TurnCall) -> AbstractAsyncContextManager[AsyncIterator[TurnEvent]]: ...


IndexedEvent = tuple[int, TurnEvent]
_MAX_QUEUED_EVENTS = 64
_FEW_CALLS = 8
_FEW_MESSAGES = 256
_LONG_PROMPT = frozenset(("prompt", "input_ids", "max_new_tokens"))
"""Fields that are at fault if a prompt is too long: for the context, or for the KV pool with its answer."""


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The calls of one request. `names`: what the protocol calls the fields that errors name. `prompt_fields`: the
    field of each call's prompt, if they differ."""

    calls: Sequence[TurnCall]
    names: FieldNames = OWN_NAMES
    prompt_fields: Sequence[str] = ()

    def of_call(self, index: int, error: ErrorInfo) -> ErrorInfo:
        """The error of one of several calls. If it is about the length of the prompt, it names that call's."""
        if not self.prompt_fields or error.param not in _LONG_PROMPT:
            return error
        return replace(error, param=self.prompt_fields[index])

    def telling_accepted(self) -> TurnPlan:
        """The same plan, whose turns tell when they are accepted."""
        calls = [replace(call, tells_accepted=True) for call in self.calls]
        return dataclasses.replace(self, calls=calls)


async def beside_streams(make: Callable[[], T], num_messages: int) -> T:
    """The result of `make`, which works on `num_messages` messages: if they are many it runs on a thread, so that
    streams go on meanwhile."""
    return make() if num_messages <= _FEW_MESSAGES else await asyncio.to_thread(make)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`. If the client leaves, cancels it, waits until it has cleaned up and raises ClientGone.

    Call it after the request's body is read: it owns `receive` from then on.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _stop((task, watch))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        await asyncio.sleep(0)


async def _stop(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until they have ended."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def open_turns(service: RunsTurns, plan: TurnPlan) -> AsyncIterator[AsyncIterator[IndexedEvent]]:
    """Runs the plan's calls at the same time and yields their events, with the index of the call, until all have ended.

    If a turn fails, its ServiceError is raised and the other turns end. Leaving the context aborts what still runs.
    """
    with plan.names.in_errors():
        if len(plan.calls) == 1:
            async with service.run(plan.calls[0]) as events:
                yield _until_finished(events)
            return
        queue: asyncio.Queue[IndexedEvent | Exception] = asyncio.Queue(_MAX_QUEUED_EVENTS)
        feeders: list[asyncio.Task[None]] = []
        starting = asyncio.create_task(_start(service, plan, queue, feeders))
        try:
            yield _merged(queue, len(plan.calls))
        finally:
            await _stop([starting])
            await _stop(feeders)


async def collect(
    service: RunsTurns, plan: TurnPlan, on_end: Callable[[int], None] = lambda _: None
) -> list[TurnEvent]:
    """Runs the plan's calls to their ends. Returns each whole turn as one event, in the order of the calls. `on_end` is
    called with the index of each call whose turn has ended."""
    turns: list[list[TurnEvent]] = [[] for _ in plan.calls]
    async with open_turns(service, plan) as events:
        async for index, event in events:
            turns[index].append(event)
            if event.finish is not None:
                on_end(index)
    return [merge_events(turn) for turn in turns]


async def _until_finished(events: AsyncIterator[TurnEvent]) -> AsyncIterator[IndexedEvent]:
    async for event in events:
        if event.error is not None:
            raise ServiceError(event.error)
        yield 0, event
        if event.finish is not None:
            return
    raise ServiceError(ErrorInfo(500, "turn_broken_off", "The turn ended without a result."))


async def _start(
    service: RunsTurns,
    plan: TurnPlan,
    queue: asyncio.Queue[IndexedEvent | Exception],
    feeders: list[asyncio.Task[None]],
) -> None:
    """Starts one call after another: sending hundreds at once would block the event loop. If they are many, the first
    one must be accepted before the others are sent: a prompt that is refused then goes to its replica once."""
    accepted = asyncio.Event()
    for index, call in enumerate(plan.calls):
        if index == 1 and len(plan.calls) > _FEW_CALLS:
            await accepted.wait()
        sent = call if index else replace(call, tells_accepted=True)
        feeders.append(asyncio.create_task(_feed(service, plan, index, sent, queue, accepted)))
        await asyncio.sleep(0)


async def _feed(
    service: RunsTurns,
    plan: TurnPlan,
    index: int,
    call: TurnCall,
    queue: asyncio.Queue[IndexedEvent | Exception],
    accepted: asyncio.Event,
) -> None:
    try:
        async with service.run(call) as events:
            async for _, event in _until_finished(events):
                accepted.set()
                if plan.calls[index].tells_accepted or not event.says_nothing:
                    await queue.put((index, event))
    except ServiceError as error:
        await queue.put(ServiceError(plan.of_call(index, error.info)))
    except Exception as error:  # handed to the reader of the queue
        await queue.put(error)


async def _merged(
    queue: asyncio.Queue[IndexedEvent | Exception], num_calls: int
) -> AsyncIterator[IndexedEvent]:
    running = num_calls
    while running:
        item = await queue.get()
        if isinstance(item, Exception):
            raise item
        if item[1].finish is not None:
            running -= 1
        yield item
