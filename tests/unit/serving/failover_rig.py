"""A cluster in this process with real engines, turns, log and dispatcher. A test can lose its replicas at any event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from controllers.cluster import Cluster
from serving.front.replica_gone import Loss as Seen
from serving.front.replica_gone import ReplicaGone
from serving.trace.turn_traces import UNTRACED, FrontTraces
from serving.watch.metrics import FailoverCause, IngressMetrics
from serving.wire.turn_events import merge_events
from serving.wire.turns import TurnCall, TurnEvent
from tests.unit.serving.local_replicas import LocalReplicas
from tests.unit.serving.local_service import LocalService, small_text
from tests.unit.serving.replica_rig import WAIT_S, Rig, SlowRunner, local_controller, running_rig

STEP_S = 0.5
"""How long a step of every replica's engine takes while nobody reads a turn's next event. A reader gets tokens one by
one, although a busy machine may keep it for so long from its next read."""
READ_S = 0.005
"""A reader that still waits lets the next step go on after so long: not every step tells it something."""


Loss = Callable[[int, TurnEvent], bool]
"""Called with the number of a turn's event and the event: whether the replica is lost there. The event is not passed on
then."""


def behind(count: int) -> Loss:
    return lambda number, _: number == count


def at_the_end(_number: int, event: TurnEvent) -> bool:
    return event.finish is not None or event.error is not None


def failovers(metrics: IngressMetrics, *causes: FailoverCause) -> float:
    """How many calls were sent again, for one of the `causes` (none named: for any)."""
    families = text_string_to_metric_families(metrics.render())
    samples = [each for family in families for each in family.samples if each.name == "kedge_failovers_total"]
    return sum(each.value for each in samples if not causes or each.labels["cause"] in causes)


class Replicas(LocalReplicas):
    """Replicas that a test can lose.

    `losses` says when a replica is lost; `dead` are the lost ones. A lost replica's turn is cut off, as if its process
    had died. With `seems_lost` the turn goes on, but nobody hears of it: `unheard` are such turns. `calls` are the
    turns that have begun. Until `delivered` is set they are on their way.
    """

    def __init__(self, rigs: Sequence[Rig]) -> None:
        super().__init__(rigs)
        self.losses: dict[str, Loss] = {}
        self.cut_off: set[str] = set()
        self.seems_lost = False
        self.unheard: list[asyncio.Task[list[TurnEvent]]] = []
        self.calls: list[tuple[str, TurnCall]] = []
        self.delivered = asyncio.Event()
        self.delivered.set()

    def lose(self, replica_id: str) -> None:
        """Loses the replica with the next event of a turn that runs there."""
        self.cut_off.add(replica_id)

    @asynccontextmanager
    async def turn(
        self, replica_id: str, call: TurnCall, epoch: int | None
    ) -> AsyncIterator[AsyncIterator[TurnEvent]]:
        rig = self.rig_at(replica_id)
        self.calls.append((rig.replica_id, call))
        await self.delivered.wait()
        events = rig.events(call, epoch)
        try:
            yield self._until_lost(rig, events)
        finally:
            if self.seems_lost and rig.replica_id in self.dead:
                self.unheard.append(asyncio.create_task(_rest_of(events, rig.runner)))
            else:
                await events.aclose()

    async def _until_lost(
        self, rig: Rig, events: AsyncIterator[TurnEvent]
    ) -> AsyncGenerator[TurnEvent, None]:
        replica_id = rig.replica_id
        lost = self.losses.pop(replica_id, None)
        number = 0
        while True:
            async with _stepping(rig.runner):
                event = await anext(events, None)
            if event is None:
                return
            if (lost is not None and lost(number, event)) or replica_id in self.cut_off:
                self.dead.add(replica_id)
                raise ReplicaGone(replica_id, Seen.DIED)
            number += 1
            yield event


class Failover:
    """A front end over the replicas "a", "b" ... of `rigs`. Sessions are opened at "a"."""

    def __init__(self, rigs: list[Rig], failover_timeout_s: float, traces: FrontTraces = UNTRACED) -> None:
        self.rigs = rigs
        self.replicas = Replicas(rigs)
        self.controller = rigs[0].controller
        self.service = LocalService(
            rigs[0],
            self.replicas,
            metrics=IngressMetrics("i"),
            failover_timeout_s=failover_timeout_s,
            traces=traces,
        )
        self.metrics = self.service.metrics
        self.owners = self.service.owners
        self.dispatcher = self.service.dispatcher

    @property
    def cluster(self) -> Cluster:
        return self.controller.cluster

    def open_session(self, session_id: str, **options: Any) -> None:
        self.rigs[0].open_session(session_id, **options)
        self.service.beat()

    async def events(self, call: TurnCall) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events, as the protocols read them."""
        async with self.dispatcher.dispatch(call) as events:
            async for event in events:
                yield event

    async def turn(self, call: TurnCall) -> TurnEvent:
        """The whole turn as one event."""
        async with aclosing(self.events(call)) as stream:
            return merge_events([event async for event in stream])

    def owner(self, session_id: str = "s") -> tuple[str, int]:
        """The session's owner and epoch in the ledger."""
        (entry,) = (entry for entry in self.cluster.sessions() if entry.session_id == session_id)
        return entry.replica_id, entry.epoch

    def committed(self, session_id: str) -> tuple[int, int]:
        """The session's numbers of turns and of tokens in the ledger."""
        (entry,) = (entry for entry in self.cluster.sessions() if entry.session_id == session_id)
        return entry.turns, entry.tokens

    async def settled(self) -> None:
        for rig in self.rigs:
            await rig.settled()
            report = await asyncio.wrap_future(rig.engine.audit())
            assert report.clean, report


@asynccontextmanager
async def running_failover(
    directory: Path,
    count: int = 2,
    *,
    failover_timeout_s: float = WAIT_S,
    timer: Callable[[], float] = time.perf_counter,
    traces: FrontTraces = UNTRACED,
    **options: Any,
) -> AsyncIterator[Failover]:
    async with AsyncExitStack() as stack:
        controller = local_controller(directory, timer)
        rigs = []
        for name in "abcdefgh"[:count]:
            rig = await stack.enter_async_context(
                running_rig(directory, replica_id=name, controller=controller, text=small_text(), **options)
            )
            rig.runner.step_s = STEP_S
            rigs.append(rig)
        yield Failover(rigs, failover_timeout_s, traces)


@asynccontextmanager
async def _stepping(runner: SlowRunner) -> AsyncIterator[None]:
    """Lets the runner's steps go on, one at a time. While the runner is held, only one does."""

    async def step() -> None:
        runner.wanted.set()
        while True:
            await asyncio.sleep(READ_S)
            if not runner.is_held:
                runner.wanted.set()

    steps = asyncio.create_task(step())
    try:
        yield
    finally:
        steps.cancel()


async def _rest_of(events: AsyncIterator[TurnEvent], runner: SlowRunner) -> list[TurnEvent]:
    async with _stepping(runner):
        return [event async for event in events]
