"""LLMReplica: one engine with its sessions, as a Ray Serve deployment. Puts the parts together and keeps them running.

The engine runs on its own thread; everything else on the deployment's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass
from typing import Any

from ray import serve

from cache.audit import PageAccounts
from controllers.errors import ControllerError, NoAnswer
from controllers.records import ForkOrder
from controllers.served_model import ServedModel
from controllers.session import SessionController
from controllers.settings import Deployment
from engine.api import DeltaSink, Engine, EngineError, EngineStats, InvalidRequest
from engine.models.hub import find_model
from engine.settings import EngineSettings, ModelSettings
from serving.background import BackgroundTasks
from serving.replica.autoscaling_policy import ReplicaLoad
from serving.replica.engine_watch import WATCH_INTERVAL_S, EngineWatch
from serving.replica.hand_over_pace import HandOverPace
from serving.replica.live_turn import TurnTeller
from serving.replica.mailbox import Mailbox
from serving.replica.session_host import SessionHost
from serving.replica.tenant_load import TenantLoad
from serving.replica.turn_commits import TurnCommits
from serving.replica.turn_request import RequestBuilder
from serving.replica.turn_runner import TurnRunner
from serving.settings.config import AppArgs
from serving.text.text import TextProcessor
from serving.watch.audit_reply import failed_audit, replica_audit
from serving.watch.metrics import ReplicaMetrics
from serving.watch.ray_gauges import RayGauges
from serving.wire.controller_calls import CONTROLLER_TIMEOUT_S, ControllerCalls, connect_controller
from serving.wire.errors import error_event, error_info, unavailable
from serving.wire.event_feed import EventFeeds, FeedItem
from serving.wire.turns import (
    ChatPrompt,
    ErrorInfo,
    FeedLine,
    ForkedSession,
    ModelInfo,
    ServiceError,
    TurnCall,
    TurnEvent,
    TurnReply,
)

logger = logging.getLogger(__name__)
serve_logger = logging.getLogger("ray.serve")  # what it is told at level INFO reaches the replica's log

ENGINE_CALL_TIMEOUT_S = 10.0
ENGINE_STOP_TIMEOUT_S = 5.0
GAUGE_INTERVAL_S = 5.0
HAND_OVER_INTERVAL_S = 0.1
HAND_OVER_TIMEOUT_S = 60.0
LAST_ANSWERS_S = 1.0
"""So long its last answers may be on their way: ingresses leave a replica that has said farewell."""
START_TIMEOUT_S = 900.0

EngineFactory = Callable[[EngineSettings, DeltaSink], Engine]


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """What a replica is given where it runs. `clock` returns monotonic seconds, `unix_clock` Unix time."""

    replica_id: str
    controller: ControllerCalls
    publish_gauges: Callable[[EngineStats], None]
    load_text: Callable[[ModelSettings, Engine], TextProcessor]
    clock: Callable[[], float]
    unix_clock: Callable[[], float]


class LLMReplica:
    """Actor methods of a replica. Errors cross as data (ErrorInfo), never as pickled exceptions.

    `place_of` finds the place in the process that the replica starts in.
    """

    async def __init__(  # type: ignore[misc]
        self,
        args: AppArgs,
        build_engine: EngineFactory,
        place_of: Callable[[AppArgs], ReplicaPlace],
    ) -> None:
        place = place_of(args)
        self._replica_id = place.replica_id
        self._args = args
        self._tasks = BackgroundTasks()
        mailbox = Mailbox(asyncio.get_running_loop())
        settings = args.engine_settings()
        self._engine = await asyncio.to_thread(build_engine, settings, mailbox.deliver)
        self._text = await asyncio.to_thread(place.load_text, settings.model, self._engine)
        self._metrics = ReplicaMetrics(self._replica_id, self._engine.stats)
        self._publish = place.publish_gauges
        self._feeds = EventFeeds()
        self._controller = place.controller
        self._model = _served_model(self._text, self._engine)
        sessions = SessionController(
            place.clock, args.sessions.idle_timeout_s, self._model, make_chain=self._engine.empty_chain
        )
        self._host = SessionHost(
            self._replica_id,
            self._engine,
            sessions,
            self._controller,
            self._tasks,
            HandOverPace(
                place.clock,
                args.rebalancing.tokens_per_s,
                within_s=args.replicas.graceful_shutdown_timeout_s / 2,
            ),
            engine_timeout_s=ENGINE_CALL_TIMEOUT_S,
            settings_hash=args.settings_hash,
        )
        self._turns = TurnRunner(
            engine=self._engine,
            sessions=sessions,
            host=self._host,
            commits=TurnCommits(
                self._controller, self._metrics, patience_s=args.controller.commit_patience_s
            ),
            builder=RequestBuilder(self._engine, self._text),
            teller=TurnTeller(self._text, self._metrics, place.clock),
            mailbox=mailbox,
            load=TenantLoad(args.tenants.max_turns_in_flight, args.tenants.max_queued_tokens),
            metrics=self._metrics,
            tasks=self._tasks,
            clock=place.clock,
        )
        self._watch = EngineWatch(self._engine, self._host, step_timeout_s=args.replicas.step_timeout_s)
        self._drained = False
        self._clock = place.clock
        self._answered_s = place.clock()
        self._calls = 0  # of `turn`, that have not been answered
        self._created = int(place.unix_clock())
        await self._start()

    async def name(self) -> str:
        """Which replica this is: calls that go to any ask first, and are then pinned to the one that answered."""
        return self._replica_id

    async def turn(self, call: TurnCall, epoch: int | None, line: FeedLine) -> TurnReply:
        """Runs a turn, see TurnRunner.run. News go ahead over the feed; cancelling the call aborts the turn.

        One that is drained takes none, also while it ends those that it has: ingresses leave it, and Serve replaces it.
        """
        if self._host.emptied:
            return TurnReply(0, (TurnEvent(error=unavailable("the replica is drained")),))
        self._calls += 1
        try:
            with self._feeds.line(line) as told:
                last = await self._turns.run(call, epoch, told.put)
                return await told.reply(last)
        except ServiceError as refused:
            return TurnReply(0, (error_event(refused),))
        finally:
            self._calls -= 1

    async def feed(self, feed_id: str, taken: int | None = None) -> AsyncGenerator[FeedItem, None]:
        """News of every turn that names this feed, see EventFeeds.stream."""
        async for batch in self._feeds.stream(feed_id, taken):
            yield batch

    async def close_session(self, session_id: str, epoch: int | None = None) -> bool | ErrorInfo:
        """True if the session was held here at that epoch; it is closed now or when its turn ends. Front ends of the
        version before name no epoch."""
        try:
            return await self._host.close(session_id, epoch)
        except ControllerError as error:
            return error_info(error)

    async def fork_session(self, parent_id: str, epoch: int, order: ForkOrder) -> ForkedSession | ErrorInfo:
        """Starts a session at the first tokens of one that is owned here, see SessionHost.fork."""
        try:
            return await self._host.fork(parent_id, epoch, order)
        except (ControllerError, EngineError) as error:
            return error_info(error)

    async def abort(self, request_id: str | None, tenant: str) -> int:
        """Aborts the tenant's requests of that name, or all of them; returns how many."""
        return self._turns.abort(request_id, tenant)

    async def heartbeat(self) -> None:
        """Reports now: what the controller thinks of this replica has changed."""
        await self._host.heartbeat()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's load, which Ray Serve asks for where `replicas.autoscaling` is set."""
        stats = self._engine.stats()
        return ReplicaLoad(stats.running + stats.waiting, stats.kv_utilization).stats()

    async def drain(self) -> ErrorInfo | None:
        """Empties this replica, see SessionHost.drain; then it fails its health checks, and Serve replaces it."""
        try:
            await self._host.drain()
        except ControllerError as error:
            return error_info(error)
        return None

    async def flush(self) -> bool:
        """Drops every cached prefix; False while requests run."""
        async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
            return await asyncio.wrap_future(self._engine.flush())

    async def audit(self) -> dict[str, Any]:
        """The deep audit, JSON ready."""
        try:
            async with asyncio.timeout(ENGINE_CALL_TIMEOUT_S):
                report = await asyncio.wrap_future(self._engine.audit())
        except (EngineError, TimeoutError) as error:
            return failed_audit(self._replica_id, str(error) or "the engine did not answer")
        return replica_audit(self._replica_id, report)

    async def metrics_text(self) -> str:
        return self._metrics.render()

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            model_id=self._args.model.model_id,
            model_path=self._args.model.path,
            tokenizer_path=self._args.model.path,
            max_context_len=self._engine.max_context_len,
            vocab_size=self._engine.vocab_size,
            created=self._created,
            tool_calls=self._text.tool_format(self._args.model.tool_calls),
        )

    async def describe(self) -> dict[str, Any]:
        """Figures for /get_server_info, JSON ready."""
        figures = replica_figures(self._replica_id, self._turns.num_live, len(self._feeds), self._engine)
        return figures | {"model": asdict(self._model.fingerprint)}

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if fault := self._watch.fault:
            raise RuntimeError(fault)
        if self._drained:
            raise RuntimeError("drained, as an operator asked for")

    async def __del__(self) -> None:
        """Serve calls it also where `__init__` raised, whose error is the one to be seen."""
        engine: Engine | None = getattr(self, "_engine", None)
        if engine is None:
            return
        await self._host.farewell()
        await self._tasks.stop(ENGINE_STOP_TIMEOUT_S)
        try:
            await asyncio.to_thread(engine.stop, ENGINE_STOP_TIMEOUT_S)
        except (EngineError, TimeoutError) as error:
            logger.error("the engine did not stop: %s", error)

    async def _start(self) -> None:
        await asyncio.to_thread(_warm, self._text)
        self._engine.start()
        serve_logger.info("replica %s: %s", self._replica_id, execution_line(self._engine))
        await self._join()
        controller, sessions = self._args.controller, self._args.sessions
        self._tasks.every(
            controller.heartbeat_interval_s, self._host.heartbeat, timeout_s=controller.replica_timeout_s
        )
        self._tasks.every(sessions.sweep_interval_s, self._host.expire_idle, timeout_s=CONTROLLER_TIMEOUT_S)
        self._tasks.every(HAND_OVER_INTERVAL_S, self._hand_over, timeout_s=HAND_OVER_TIMEOUT_S)
        self._tasks.every(WATCH_INTERVAL_S, self._watch.look, timeout_s=CONTROLLER_TIMEOUT_S)
        self._tasks.every(GAUGE_INTERVAL_S, self._publish_gauges, timeout_s=GAUGE_INTERVAL_S)

    async def _join(self) -> None:
        """A controller that is away, or has no log, costs the wait for it, not the model that is loaded. Raises
        SettingsRefused."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    await self._controller.announce()
                    await self._controller.register_replica(self._host.status())
                except NoAnswer as error:
                    logger.warning("still waiting for the cluster controller: %s", error)
                else:
                    return

    async def _hand_over(self) -> None:
        await self._host.hand_over()
        if self._drained:
            return
        if self._calls or not self._host.emptied:
            self._answered_s = self._clock()
        elif self._clock() - self._answered_s > LAST_ANSWERS_S:
            self._drained = True
            await self._host.farewell()

    async def _publish_gauges(self) -> None:
        self._publish(self._engine.stats())


def place_in_serve(args: AppArgs, *, deployment: Deployment) -> ReplicaPlace:
    """That of a replica of Ray Serve."""
    return ReplicaPlace(
        replica_id=serve.get_replica_context().replica_id.unique_id,
        controller=connect_controller(args.controller.name, deployment),
        publish_gauges=RayGauges().publish,
        load_text=_load_text,
        clock=time.monotonic,
        unix_clock=time.time,
    )


def replica_figures(replica_id: str, num_live: int, num_feeds: int, engine: Engine) -> dict[str, Any]:
    """JSON ready; `feeds` are the ingresses that listen, `tasks` those of the event loop. Under `execution` is
    what the engine runs on and how."""
    stats = engine.stats()
    return {
        "replica_id": replica_id,
        "pid": os.getpid(),
        "live_turns": num_live,
        "feeds": num_feeds,
        "tasks": len(asyncio.all_tasks()),
        **asdict(stats),
        "pages": _pages(stats.pages),
        "window_pages": None if stats.window_pages is None else _pages(stats.window_pages),
        "execution": engine.describe(),
    }


def execution_line(engine: Engine) -> str:
    """The same for the log."""
    return ", ".join(f"{name} {value}" for name, value in engine.describe().items())


def _pages(pages: PageAccounts) -> dict[str, int]:
    return asdict(pages) | {"leaked": pages.leaked}


def _load_text(model: ModelSettings, engine: Engine) -> TextProcessor:
    directory = find_model(model.path, model.revision)
    return TextProcessor.load(
        str(directory), vocab_size=engine.vocab_size, max_context_len=engine.max_context_len
    )


def _served_model(text: TextProcessor, engine: Engine) -> ServedModel:
    weights = engine.describe().get("model_fingerprint")
    return ServedModel(text.fingerprint(None if weights is None else str(weights)), engine.vocab_size)


def _warm(text: TextProcessor) -> None:
    """Compiles the chat template now rather than at the first request."""
    try:
        text.encode_prompt(ChatPrompt(({"role": "user", "content": "hello"},)))
    except InvalidRequest as error:
        logger.info("no chat: %s", error.message)
