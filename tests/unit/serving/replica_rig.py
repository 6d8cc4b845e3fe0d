"""One replica without Ray and without a model: the real engine on the null runner, the real controller logic on
SQLite."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from cache.audit import PageAccounts
from controllers.cluster import Cluster
from controllers.errors import StoreError
from controllers.joined_answers import joined_measures
from controllers.records import TurnRecord
from controllers.served_model import ServedModel
from controllers.session import SessionController
from controllers.settings import ClusterSettings
from controllers.sqlite_store import SqliteSessionStore
from engine.api import Engine, SamplingParams
from engine.build import assemble_engine
from engine.settings import CacheSettings, SchedulerSettings, SpeculationSettings
from serving.background import BackgroundTasks
from serving.front.replica_calls import TurnEvents
from serving.grammars.constraints import ConstraintCompiler
from serving.replica.drain import ReplicaDrain
from serving.replica.empty_turns import EmptyTurns
from serving.replica.ending_turns import EndingTurns
from serving.replica.gauges import replica_gauges
from serving.replica.heartbeats import Heartbeats
from serving.replica.kv_watch import KVWatch
from serving.replica.live_turn import EventMaker
from serving.replica.mailbox import Mailbox
from serving.replica.ordered_moves import OrderedMoves
from serving.replica.pinned_calls import PinnedCalls
from serving.replica.replica import replica_figures
from serving.replica.session_host import SessionHost
from serving.replica.session_offers import SessionOffers
from serving.replica.tenant_load import TenantLoad
from serving.replica.turn_commits import TurnCommits
from serving.replica.turn_request import RequestBuilder
from serving.replica.turn_runner import TurnRunner
from serving.replica.unnamed_sessions import UnnamedSessions
from serving.settings.config import MetricsArgs
from serving.text.text import TextProcessor
from serving.trace.opening import replica_traces
from serving.watch.metrics import ReplicaMetrics
from serving.watch.registry import NO_LABELS
from serving.wire.turns import ModelInfo, SessionTurn, TokenPrompt, TurnCall, TurnEvent
from tests.unit.engine.driver import ADAPTERS
from tests.unit.engine.null_runner import EOS_TOKEN_ID, NullRunner

if TYPE_CHECKING:
    from serving.trace.spans import Spans

VOCAB_SIZE = 1000
REPLICA_ID = "replica-a"
MODEL = ModelInfo("null-model", "/models/null", "/models/null", 512, VOCAB_SIZE, 1_700_000_000, "hermes")
OFF = SpeculationSettings()
WAIT_S = 20.0
"""How long a test waits for something that must happen at once."""
DRAIN_WITHIN_S = 30.0
SILENCE_S = 3600.0
"""Rigs send no heartbeats. However slow the machine is, none of them is gone for that."""
HELD_S = 60.0
"""How long a step of a held runner takes at most."""


class SwitchableLog:
    """The session log in a file. While it is `away`, reads and writes fail."""

    def __init__(self, path: Path) -> None:
        self._store = SqliteSessionStore(path)
        self.away = False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise StoreError("the log is away")
        return getattr(self._store, name)


class LocalController:
    """Stands in for ControllerCalls: the same methods on a Cluster in this process.

    Each of `failures` is raised once in place of the call. Each of `lost_replies` is raised once after the call was
    carried out. While the `gate` is closed nothing is answered. `log` is the cluster's log.
    """

    def __init__(self, cluster: Cluster, log: SwitchableLog) -> None:
        self.cluster = cluster
        self.log = log
        self.failures: dict[str, list[Exception]] = {}
        self.lost_replies: dict[str, list[Exception]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        """Calls that are not answered yet because the gate is closed."""
        self.shards = (self,)

    def shard_of(self, _key: str) -> int:
        return 0

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        method = self._method(name)

        async def call(*args: Any) -> Any:
            self.waiting += 1
            try:
                await self.gate.wait()
            finally:
                self.waiting -= 1
            if failures := self.failures.get(name):
                raise failures.pop(0)
            result = method(*args)
            if lost := self.lost_replies.get(name):
                raise lost.pop(0)
            return result

        return call

    def _method(self, name: str) -> Callable[..., Any]:
        """The method of the cluster, or of the part of it to which the actor hands the call."""
        parts: dict[str, Callable[..., Any]] = {
            "commit_turn": self._commit_turn,
            "notes": self.cluster.notes.page,
            "forget_note": self.cluster.notes.forget,
            "view": self.cluster.watch.view,
            "measures": lambda: joined_measures([self.cluster.measures()]),
        }
        return parts.get(name) or getattr(self.cluster, name)

    def _commit_turn(self, record: TurnRecord) -> None:
        (refusal,) = self.cluster.commits.commit([record])
        if refusal is not None:
            raise refusal


def local_controller(directory: Path, timer: Callable[[], float] = time.perf_counter) -> LocalController:
    log = SwitchableLog(directory / "log.sqlite3")
    store: Any = log
    return LocalController(
        Cluster(ClusterSettings(replica_timeout_s=SILENCE_S), store, time.time, timer), log
    )


class SlowRunner(NullRunner):
    """A null runner whose steps take `step_s`. If `wanted` is set, a step ends at once and clears it. While the runner
    is held, a turn that has begun stays in flight, however long the test takes."""

    def __init__(self, *args: Any, step_s: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.step_s = step_s
        self.wanted = threading.Event()
        self.entered = threading.Event()

    def execute(self, batch: Any) -> Any:
        self.entered.set()
        self.wanted.wait(self.step_s)
        self.wanted.clear()
        return super().execute(batch)

    def hold(self) -> None:
        self.entered.clear()
        self.wanted.clear()
        self.step_s = HELD_S

    @property
    def is_held(self) -> bool:
        return self.step_s == HELD_S

    async def held(self) -> None:
        """Waits until the engine stands still in a step."""
        assert await asyncio.to_thread(self.entered.wait, WAIT_S)

    def go_on(self) -> None:
        self.step_s = 0.0
        self.wanted.set()


@functools.lru_cache(maxsize=4)
def constraints_of(text: TextProcessor) -> ConstraintCompiler:
    """Rigs with the same text share it: its process takes half a second to start."""
    return ConstraintCompiler(text.tokenizer, VOCAB_SIZE)


class Rig:
    """All parts of one replica, for tests to look into. Rigs that share a `controller` form a cluster."""

    def __init__(
        self,
        directory: Path,
        *,
        replica_id: str = REPLICA_ID,
        controller: LocalController | None = None,
        idle_timeout_s: float = 3600.0,
        commit_patience_s: float = WAIT_S,
        text: TextProcessor | None = None,
        speculation: SpeculationSettings = OFF,
        num_pages: int = 256,
        model: ServedModel | None = None,
        drain_clock: Callable[[], float] = time.monotonic,
        tokens_per_s: float = 5000.0,
        load: TenantLoad | None = None,
        max_running: int = 64,
        metric_labels: Mapping[str, str] = NO_LABELS,
        spans: Spans | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.unix_clock = time.time
        self.controller = controller or local_controller(directory)
        calls: Any = self.controller
        self.runner = SlowRunner(num_pages, 4, VOCAB_SIZE, 512, adapters=ADAPTERS)
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.engine = _engine_of(self.runner, speculation, self.mailbox, max_running)
        self.tasks = BackgroundTasks()
        text = text or TextProcessor(None, vocab_size=VOCAB_SIZE, max_context_len=512)
        self.model = model or ServedModel(text.fingerprint("null"), VOCAB_SIZE)
        make_chain = self.engine.empty_chain
        self.sessions = SessionController(time.monotonic, idle_timeout_s, self.model, make_chain=make_chain)
        self._hold_sessions(drain_clock, tokens_per_s)
        self.moves = OrderedMoves(replica_id, self.host, self.sessions, calls, self.tasks)
        self.metrics = ReplicaMetrics(replica_id, self.engine.stats, metric_labels)
        self.builder = RequestBuilder(self.engine, text, constraints_of(text))
        self.unnamed = UnnamedSessions(time.monotonic, idle_timeout_s, self.engine)
        self.kv_watch = self._kv_watch()
        commits = TurnCommits(calls, self.metrics, patience_s=commit_patience_s)
        ending = EndingTurns(self.tasks)
        self.empty_turns = EmptyTurns(self.sessions, self.host, commits, ending, self.tasks)
        self.turns = TurnRunner(
            engine=self.engine,
            sessions=self.sessions,
            host=self.host,
            drain=self.drain,
            commits=commits,
            ending=ending,
            unnamed=self.unnamed,
            builder=self.builder,
            event_maker=EventMaker(text, self.metrics, time.perf_counter),
            mailbox=self.mailbox,
            load=load or TenantLoad(),
            metrics=self.metrics,
            tasks=self.tasks,
            clock=time.perf_counter,
            unix_clock=lambda: self.unix_clock(),
            traces=replica_traces(spans, replica_id),
        )
        self.calls = self._pinned_calls()

    def _hold_sessions(self, drain_clock: Callable[[], float], tokens_per_s: float) -> None:
        calls: Any = self.controller
        self.host = SessionHost(
            self.replica_id,
            self.engine,
            self.sessions,
            calls,
            self.tasks,
            engine_timeout_s=WAIT_S,
            on_loaded=lambda after_s: self.metrics.session_loaded(after_s),
        )
        self.offers = SessionOffers(self.replica_id, calls)
        self.drain = ReplicaDrain(
            self.replica_id,
            self.host,
            self.sessions,
            self.offers,
            calls,
            self.tasks,
            calls=lambda: self.turns.num_live,
            clock=drain_clock,
            tokens_per_s=tokens_per_s,
            within_s=DRAIN_WITHIN_S,
        )
        self.heartbeats = Heartbeats(
            self.replica_id, self.engine, self.sessions, calls, self.host, self.offers, self.drain
        )

    def _pinned_calls(self) -> PinnedCalls:
        return PinnedCalls(
            self.replica_id,
            self.engine,
            host=self.host,
            turns=self.turns,
            empty_turns=self.empty_turns,
            moves=self.moves,
            unnamed=self.unnamed,
            drain=self.drain,
            builder=self.builder,
            kv_watch=self.kv_watch,
            metrics=self.metrics,
            describe=lambda: replica_figures(self.replica_id, self.turns.num_live, 0, self.engine),
            model_info=lambda: MODEL,
            engine_timeout_s=WAIT_S,
        )

    def _kv_watch(self) -> KVWatch:
        watch = KVWatch(
            self.engine,
            self.metrics,
            lambda session_id: self.sessions.epoch(session_id) is not None or session_id in self.unnamed,
            MetricsArgs(audit_interval_s=0.1, tenant_names=True),
            clock=map(float, itertools.count()).__next__,  # a walk is due at every look
            unix_clock=time.time,
        )
        self.metrics.read(replica_gauges(self.engine, self.sessions, self.unnamed, lambda: 0))
        return watch

    def open_session(self, session_id: str, **options: Any) -> int:
        """Registers a session in the ledger. Returns its epoch."""
        cluster = self.controller.cluster
        cluster.register_replica(self.heartbeats.status())
        assignment = cluster.open_session(
            session_id, "", options.get("timeout_s"), options.get("capacity_tokens"), uuid.uuid4().hex
        )
        return int(assignment.epoch)

    async def run(self, call: TurnCall, epoch: int | None = None) -> list[TurnEvent]:
        """Runs a whole turn. Returns its events."""
        return [event async for event in self.events(call, epoch)]

    async def events(self, call: TurnCall, epoch: int | None = None) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events as an ingress reads them. Closing it cancels the turn."""
        events = TurnEvents()

        async def run() -> None:
            events.deliver(await self.turns.run(call, epoch, events.deliver))

        turn = asyncio.create_task(run())
        try:
            async for event in events:
                yield event
        finally:
            turn.cancel()
            await asyncio.wait([turn])

    async def begun(self, count: int = 1) -> None:
        """Waits until at least `count` turns are at the engine."""
        async with asyncio.timeout(WAIT_S):
            while self.turns.num_live < count:
                await asyncio.sleep(0.001)

    async def asked_controller(self, count: int) -> None:
        """Waits until exactly `count` calls wait at the controller's closed gate."""
        async with asyncio.timeout(WAIT_S):
            while self.controller.waiting != count:
                await asyncio.sleep(0.001)

    async def pending_commits(self, count: int) -> None:
        """Waits until exactly `count` finished turns wait for the log."""
        async with asyncio.timeout(WAIT_S):
            while self.figure("kedge_commits_pending") != count:
                await asyncio.sleep(0.001)

    def figure(self, name: str, **labels: str) -> float:
        """The value of a metric of the replica; 0 if it has no such sample."""
        wanted = {"replica": self.replica_id, **labels}
        families = text_string_to_metric_families(self.metrics.render())
        samples = [sample for family in families for sample in family.samples]
        return sum(sample.value for sample in samples if sample.name == name and sample.labels == wanted)

    async def in_turn(self, session_id: str) -> None:
        """Waits until the session has a turn, or is being forked."""
        async with asyncio.timeout(WAIT_S):
            while not any(each.in_turn for each in self.sessions.snapshot() if each.session_id == session_id):
                await asyncio.sleep(0.001)

    async def pages(self) -> PageAccounts:
        """The accounts of the full pool from an audit, because the engine's statistics lag behind."""
        report = await asyncio.wrap_future(self.engine.audit())
        assert report.clean, report
        return report.pools["full"]

    async def settled(self) -> None:
        """Waits until nothing is left of any turn."""
        for _ in range(500):
            if not self.turns.num_live and not self.tasks._tasks:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("turns did not settle")

    async def books_are_empty(self) -> None:
        """Checks that all pages are free once sessions are closed, unnamed conversations are forgotten and cached
        prefixes are flushed."""
        await self.settled()
        self.unnamed.forget_all()
        assert await asyncio.wrap_future(self.engine.flush())
        assert await asyncio.wrap_future(self.engine.session_kv_tokens()) == {}
        pages = await self.pages()
        assert pages.free == pages.total, pages


@asynccontextmanager
async def running_rig(directory: Path, **options: Any) -> AsyncIterator[Rig]:
    rig = Rig(directory, **options)
    rig.engine.start()
    try:
        yield rig
    finally:
        await rig.tasks.stop(2.0)
        await asyncio.to_thread(rig.engine.stop, 5.0)


def call(
    tokens: list[int], session: str | None = None, *, max_new_tokens: int | None = 8, **options: Any
) -> TurnCall:
    """A greedy call with token ids."""
    turn = None if session is None else SessionTurn(session, options.pop("key", None))
    return TurnCall(
        request_id=options.pop("request_id", "r"),
        prompt=TokenPrompt(tuple(tokens)),
        sampling=SamplingParams(temperature=0.0),
        max_new_tokens=max_new_tokens,
        session=turn,
        **options,
    )


def tokens_of(events: list[TurnEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def _engine_of(
    runner: SlowRunner, speculation: SpeculationSettings, mailbox: Mailbox, max_running: int
) -> Engine:
    return assemble_engine(
        runner,
        CacheSettings(books="strict"),
        SchedulerSettings(chunk_size=32, max_running=max_running),
        speculation,
        frozenset({EOS_TOKEN_ID}),
        mailbox.deliver,
    )
