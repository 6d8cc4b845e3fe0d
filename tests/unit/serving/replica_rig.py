"""One replica without Ray and without a model: the real engine on the null runner, the real controller logic on
SQLite."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from cache.audit import PageAccounts
from controllers.cluster import Cluster
from controllers.errors import StoreError
from controllers.records import TurnRecord
from controllers.served_model import ServedModel
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings
from engine.api import Engine, SamplingParams
from engine.assembly import assemble_engine
from engine.settings import CacheSettings, SchedulerSettings, SpeculationSettings
from serving.background import BackgroundTasks
from serving.front.replica_calls import TurnEvents
from serving.grammars.constraints import ConstraintCompiler
from serving.replica.environment import ReplicaEnvironment
from serving.replica.mailbox import Mailbox
from serving.replica.parts import ReplicaParts
from serving.settings.config import AppArgs, parse_args
from serving.settings.record_args import MetricsArgs
from serving.text.text import TextProcessor
from serving.wire.controller_calls import ControllerCalls
from serving.wire.turns import ModelInfo, SamplingDefaults, SessionTurn, TokenPrompt, TurnCall, TurnEvent
from tests.unit.engine.driver import ADAPTERS
from tests.unit.engine.null_runner import EOS_TOKEN_ID, NullRunner

if TYPE_CHECKING:
    from serving.trace.spans import Spans

VOCAB_SIZE = 1000
REPLICA_ID = "replica-a"
MODEL = ModelInfo("null-model", "/models/null", "/models/null", 512, VOCAB_SIZE, 1_700_000_000, "hermes")
OFF = SpeculationSettings()
METRIC_LABELS = MappingProxyType({"cluster": "kedge", "model": MODEL.model_id})
"""Those that every metric has."""
WAIT_S = 20.0
"""How long a test waits for something that must happen at once."""
DRAIN_WITHIN_S = 30.0
SILENCE_S = 3600.0
"""Rigs send no heartbeats. However slow the machine is, none of them is gone for that."""
ENDS_AT_ONCE = {"sessions": {"idle_timeout_s": 1e-6}}
"""Settings with which each session is idle for too long as soon as its turn has ended."""
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

    async def figures(self, patience_s: float) -> Any:
        return await self._calls().figures(patience_s)

    async def look(self, after: str | None, limit: int, patience_s: float) -> Any:
        return await self._calls().look(after, limit, patience_s)

    def _calls(self) -> ControllerCalls:
        only_shard: Any = self
        return ControllerCalls([only_shard])

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
            "measures": self.cluster.measures,
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


def settings_of(sections: Mapping[str, Any]) -> AppArgs:
    """Settings of a replica, by section. A walk over the pages is due at every look."""
    args = parse_args(
        {
            "model": {"path": MODEL.model_id},
            "replicas": {"graceful_shutdown_timeout_s": 2 * DRAIN_WITHIN_S},
            **sections,
        }
    )
    always = MetricsArgs.model_construct(audit_interval_s=0.0, tenant_names=True)
    return args.model_copy(update={"metrics": always})


@functools.lru_cache(maxsize=4)
def constraints_of(text: TextProcessor) -> ConstraintCompiler:
    """Rigs with the same text share it: its process takes half a second to start."""
    return ConstraintCompiler(text.tokenizer, VOCAB_SIZE)


class NoLinks:
    """The links of a replica without front ends. Its own turns stand for their calls."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def __len__(self) -> int:
        return 0

    @property
    def calls(self) -> int:
        return self._rig.turns.num_live


class Rig(ReplicaParts):
    """All parts of one replica, for tests to look into. Rigs that share a `controller` form a cluster."""

    def __init__(
        self,
        directory: Path,
        *,
        replica_id: str = REPLICA_ID,
        controller: LocalController | None = None,
        text: TextProcessor | None = None,
        speculation: SpeculationSettings = OFF,
        num_pages: int = 256,
        model: ServedModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_running: int = 64,
        spans: Spans | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.unix_clock = time.time
        self.controller = controller or local_controller(directory)
        self.runner = SlowRunner(num_pages, 4, VOCAB_SIZE, 512, adapters=ADAPTERS)
        mailbox = Mailbox(asyncio.get_running_loop())
        engine = _engine_of(self.runner, speculation, mailbox, max_running)
        text = text or TextProcessor(None, vocab_size=VOCAB_SIZE, max_context_len=512)
        nothing: Any = None
        calls: Any = self.controller
        environment = ReplicaEnvironment(
            replica_id,
            controller=calls,
            listener=nothing,
            publish_gauges=nothing,
            load_text=nothing,
            clock=clock,
            unix_clock=lambda: self.unix_clock(),
            settle=nothing,
        )
        super().__init__(
            settings_of(settings or {}),
            environment,
            engine,
            mailbox,
            BackgroundTasks(),
            NoLinks(self),
            text=text,
            constraints=constraints_of(text),
            model=model or ServedModel(text.fingerprint("null"), VOCAB_SIZE),
            sampling=SamplingDefaults(),
            spans=spans,
        )

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
        wanted = {"replica": self.replica_id, **METRIC_LABELS, **labels}
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
