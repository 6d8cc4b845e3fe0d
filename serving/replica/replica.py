"""LLMReplica: one engine with its sessions, as a Ray Serve deployment. It builds the parts and keeps them running.

The engine runs on its own thread; everything else runs on the actor's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from cache.audit import PageAccounts
from controllers.errors import ControllerError
from controllers.served_model import ServedModel
from controllers.session import SessionController
from engine.api import Engine, EngineError, InvalidRequest
from engine.models.hub import find_model
from serving.background import BackgroundTasks
from serving.grammars.constraints import ConstraintCompiler
from serving.logs.call_facts import CALL_FACTS, CallFacts
from serving.replica.autoscaling_policy import ReplicaLoad
from serving.replica.drain import HAND_OVER_INTERVAL_S, DrainState, ReplicaDrain
from serving.replica.empty_turns import EmptyTurns
from serving.replica.ending_turns import EndingTurns
from serving.replica.engine_factory import EngineFactory
from serving.replica.engine_watch import WATCH_INTERVAL_S, EngineWatch
from serving.replica.gauges import replica_gauges
from serving.replica.generation_config import sampling_defaults
from serving.replica.heartbeats import Heartbeats
from serving.replica.kv_watch import LOOK_INTERVAL_S, KVWatch
from serving.replica.link_server import TICK_S, Emit, LinkServer
from serving.replica.live_turn import EventMaker
from serving.replica.mailbox import Mailbox
from serving.replica.ordered_moves import OrderedMoves
from serving.replica.pinned_calls import PinnedCalls
from serving.replica.place import ReplicaPlace
from serving.replica.session_host import SessionHost
from serving.replica.session_offers import SessionOffers
from serving.replica.tenant_load import TenantLoad
from serving.replica.turn_commits import TurnCommits
from serving.replica.turn_request import RequestBuilder
from serving.replica.turn_runner import TurnRunner
from serving.replica.unnamed_sessions import UnnamedSessions
from serving.settings.config import AppArgs
from serving.settings.engine_args import ModelArgs
from serving.text.text import TextProcessor
from serving.trace.opening import open_spans, replica_traces
from serving.watch.metrics import ReplicaMetrics
from serving.wire.calls import AnyCall, RunTurn, answer_of
from serving.wire.controller_calls import CONTROLLER_TIMEOUT_S, once_up
from serving.wire.errors import error_info, unavailable
from serving.wire.turns import ChatPrompt, ModelInfo, SamplingDefaults, ServiceError, TurnEvent

if TYPE_CHECKING:
    from serving.debug.replica_faults import ReplicaFaults

logger = logging.getLogger(__name__)
serve_logger = logging.getLogger("ray.serve")  # its records of level INFO reach the replica's log

ENGINE_CALL_TIMEOUT_S = 10.0
ENGINE_STOP_TIMEOUT_S = 5.0
GAUGE_INTERVAL_S = 5.0
HAND_OVER_TIMEOUT_S = 60.0
RETIRE_SHARE = 0.9
"""The share of Serve's shutdown timeout for ending turns and handing over sessions. At the timeout Serve ends the
process, whatever is left."""


class LLMReplica:
    """A replica's actor. Front ends call it over their links. Errors are sent as data (ErrorInfo).

    `place_of` builds the replica's place; it is called in the replica's process.
    """

    async def __init__(  # type: ignore[misc]
        self,
        args: AppArgs,
        build_engine: EngineFactory,
        place_of: Callable[[AppArgs], Awaitable[ReplicaPlace]],
    ) -> None:
        self._built = False
        self._args = args
        self._tasks = BackgroundTasks()
        mailbox = Mailbox(asyncio.get_running_loop())
        settings = args.engine_settings()
        # Meanwhile the replica waits for the controller, which may only be starting.
        self._building = asyncio.create_task(asyncio.to_thread(build_engine, settings, mailbox.deliver))
        place = await place_of(args)
        self._replica_id = place.replica_id
        self._listener = place.listener
        self._engine = await self._building
        self._text = await asyncio.to_thread(place.load_text, settings.model, self._engine)
        self._sampling = await asyncio.to_thread(_sampling_of, args.model)
        self._metrics = ReplicaMetrics(self._replica_id, self._engine.stats, args.metric_labels)
        self._metrics.tell_ended(place.turn_ended)
        self._publish = place.publish_gauges
        self._controller = place.controller
        self._links = LinkServer(place.listener, self.serve, self._tasks)
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
            engine_timeout_s=ENGINE_CALL_TIMEOUT_S,
            on_loaded=self._metrics.session_loaded,
        )
        self._drain, self._heartbeats = self._drain_of(sessions, place.clock)
        constraints = ConstraintCompiler(self._text.tokenizer, self._engine.vocab_size)
        self._builder = RequestBuilder(self._engine, self._text, constraints)
        self._unnamed = UnnamedSessions(place.clock, args.sessions.unnamed.idle_timeout_s, self._engine)
        self._spans = open_spans(args.tracing, "replica", self._replica_id)
        self._turns, self._empty_turns = self._turns_of(sessions, mailbox, place)
        self._kv_watch = KVWatch(
            self._engine,
            self._metrics,
            lambda session_id: sessions.epoch(session_id) is not None or session_id in self._unnamed,
            args.metrics,
            clock=place.clock,
            unix_clock=place.unix_clock,
        )
        self._calls = self._calls_of(sessions)
        self._metrics.read(replica_gauges(self._engine, sessions, self._unnamed, lambda: len(self._links)))
        self._watch = EngineWatch(self._engine, self._heartbeats, step_timeout_s=args.replicas.step_timeout_s)
        self._created = int(place.unix_clock())
        self._built = True
        await self._start(place.settle)

    def _turns_of(
        self, sessions: SessionController, mailbox: Mailbox, place: ReplicaPlace
    ) -> tuple[TurnRunner, EmptyTurns]:
        args = self._args
        commits = TurnCommits(self._controller, self._metrics, patience_s=args.controller.commit_patience_s)
        ending = EndingTurns(self._tasks)
        turns = TurnRunner(
            engine=self._engine,
            sessions=sessions,
            host=self._host,
            drain=self._drain,
            commits=commits,
            ending=ending,
            unnamed=self._unnamed,
            builder=self._builder,
            event_maker=EventMaker(self._text, self._metrics, place.clock),
            mailbox=mailbox,
            load=TenantLoad(args.tenants.max_turns_in_flight, args.tenants.max_queued_tokens),
            metrics=self._metrics,
            tasks=self._tasks,
            clock=place.clock,
            unix_clock=place.unix_clock,
            traces=replica_traces(self._spans, self._replica_id),
        )
        return turns, EmptyTurns(sessions, self._host, commits, ending, self._tasks)

    def _drain_of(
        self, sessions: SessionController, clock: Callable[[], float]
    ) -> tuple[ReplicaDrain, Heartbeats]:
        offers = SessionOffers(self._replica_id, self._controller)
        drain = ReplicaDrain(
            self._replica_id,
            self._host,
            sessions,
            offers,
            self._controller,
            self._tasks,
            calls=lambda: self._links.calls,
            clock=clock,
            tokens_per_s=self._args.rebalancing.tokens_per_s,
            within_s=self._args.replicas.graceful_shutdown_timeout_s / 2,
        )
        heartbeats = Heartbeats(
            self._replica_id,
            self._engine,
            sessions,
            self._controller,
            self._host,
            offers,
            drain,
            settings_hash=self._args.settings_hash,
        )
        return drain, heartbeats

    def _calls_of(self, sessions: SessionController) -> PinnedCalls:
        return PinnedCalls(
            self._replica_id,
            self._engine,
            host=self._host,
            turns=self._turns,
            empty_turns=self._empty_turns,
            moves=OrderedMoves(self._replica_id, self._host, sessions, self._controller, self._tasks),
            unnamed=self._unnamed,
            drain=self._drain,
            builder=self._builder,
            kv_watch=self._kv_watch,
            metrics=self._metrics,
            describe=self._describe,
            model_info=self._model_info,
            engine_timeout_s=ENGINE_CALL_TIMEOUT_S,
            faults=self._faults_to_plant() if self._args.debug.faults else None,
        )

    def _faults_to_plant(self) -> ReplicaFaults:
        from serving.debug.replica_faults import ReplicaFaults  # loaded only where faults are on

        return ReplicaFaults(self._engine, self._host, self._heartbeats, self._tasks)

    async def serve(self, call: AnyCall, emit: Emit) -> None:
        """Carries out a front end's call. Errors are sent as answers."""
        if isinstance(call, RunTurn):
            await self._turn(call, emit)
            return
        try:
            emit(answer_of(await self._calls.answer(call)))
        except (ControllerError, EngineError, ServiceError) as error:
            emit(answer_of(error_info(error)))
        except Exception as error:
            logger.exception("%s failed", type(call).__name__)
            emit(answer_of(error_info(error)))

    async def _turn(self, call: RunTurn, emit: Emit) -> None:
        """Runs a turn, see TurnRunner.run. A drained replica takes no turns, not even while it still runs some. Front
        ends leave it, and Serve replaces it."""
        if self._drain.emptied:
            self._metrics.turn_ended("moved")
            emit(TurnEvent(error=unavailable("the replica is drained")))
            return
        # Each call runs in a task of its own.
        CALL_FACTS.set(CallFacts.at_replica(call.turn, self._replica_id, call.epoch))
        try:
            emit(await self._turns.run(call.turn, call.epoch, emit))
        except Exception as error:
            logger.exception("request %s failed", call.turn.request_id)
            emit(TurnEvent(error=error_info(error)))
        finally:
            self._drain.answered()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's load. Ray Serve calls this if `replicas.autoscaling` is set."""
        stats = self._engine.stats()
        return ReplicaLoad(stats.running + stats.waiting, stats.kv_utilization).stats()

    def _model_info(self) -> ModelInfo:
        return ModelInfo(
            model_id=self._args.model.model_id,
            model_path=self._args.model.path,
            tokenizer_path=self._args.model.path,
            max_context_len=self._engine.max_context_len,
            vocab_size=self._engine.vocab_size,
            created=self._created,
            tool_calls=self._text.tool_format(self._args.model.tool_calls),
            reasoning=self._text.reasoning_format(self._args.model.reasoning),
            sampling=self._sampling,
            aliases=tuple(self._args.model.aliases),  # for front ends of the version before
        )

    def _describe(self) -> dict[str, Any]:
        """Figures for /get_server_info, JSON ready."""
        figures = replica_figures(self._replica_id, self._turns.num_live, len(self._links), self._engine)
        state = "draining" if self._drain.draining else "up"
        return figures | {"state": state, "model": asdict(self._model.fingerprint)}

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if fault := self._watch.fault:
            raise RuntimeError(fault)
        if self._drain.state is DrainState.DRAINED:
            raise RuntimeError("drained, as an operator asked for")

    async def __del__(self) -> None:
        """Stops the replica. Serve also calls this after `__init__` has raised, at any of its lines: that error must
        stay the visible one."""
        building: asyncio.Task[Engine] | None = getattr(self, "_building", None)
        if building is None:
            return
        await asyncio.wait([building])
        if building.cancelled() or building.exception() is not None:
            return
        try:
            if self._built:
                await self._drain.retire(RETIRE_SHARE * self._args.replicas.graceful_shutdown_timeout_s)
                await self._heartbeats.farewell()
        finally:
            await self._stop(building.result())

    async def _stop(self, engine: Engine) -> None:
        await self._tasks.stop(ENGINE_STOP_TIMEOUT_S)
        if (listener := getattr(self, "_listener", None)) is not None:
            await listener.close()
        if self._built:
            self._controller.close()
        if (spans := getattr(self, "_spans", None)) is not None:
            await asyncio.to_thread(spans.close)
        try:
            await asyncio.to_thread(engine.stop, ENGINE_STOP_TIMEOUT_S)
        except (EngineError, TimeoutError) as error:
            logger.error("the engine did not stop: %s", error)

    async def _start(self, settle: Callable[[], None]) -> None:
        await asyncio.to_thread(_warm, self._text)
        settle()
        self._engine.start()
        serve_logger.info("replica %s: %s", self._replica_id, execution_line(self._engine))
        self._heartbeats.address = self._listener.open(self._links.frame_came)
        controller, sessions = self._args.controller, self._args.sessions
        # Each by itself: a shard that does not answer must not delay others.
        for shard in range(controller.shards):
            beat = partial(self._heartbeats.beat, shard)
            self._tasks.every(controller.heartbeat_interval_s, beat, timeout_s=controller.replica_timeout_s)
        self._tasks.every(sessions.sweep_interval_s, self._host.expire_idle, timeout_s=CONTROLLER_TIMEOUT_S)
        self._tasks.every(
            sessions.sweep_interval_s, self._unnamed.expire_idle, timeout_s=CONTROLLER_TIMEOUT_S
        )
        self._tasks.every(HAND_OVER_INTERVAL_S, self._hand_over, timeout_s=HAND_OVER_TIMEOUT_S)
        self._tasks.every(WATCH_INTERVAL_S, self._watch.look, timeout_s=CONTROLLER_TIMEOUT_S)
        self._tasks.every(LOOK_INTERVAL_S, self._kv_watch.look, timeout_s=3 * ENGINE_CALL_TIMEOUT_S)
        self._tasks.every(TICK_S, self._links.watch, timeout_s=TICK_S)
        self._tasks.every(GAUGE_INTERVAL_S, self._publish_gauges, timeout_s=GAUGE_INTERVAL_S)
        await once_up(self._join)  # a shard that answers has sessions here while another one is waited for

    async def _join(self) -> None:
        """Registers with the controller. Raises SettingsRefused."""
        await self._controller.announce()
        await self._controller.register_replica(self._heartbeats.status())

    async def _hand_over(self) -> None:
        await self._drain.hand_over()
        if self._drain.end_if_empty():
            await self._heartbeats.farewell()

    async def _publish_gauges(self) -> None:
        self._publish(self._engine.stats())


def replica_figures(replica_id: str, num_live: int, num_links: int, engine: Engine) -> dict[str, Any]:
    """A replica's figures, JSON ready. `links` counts the connected front ends, `tasks` the event loop's tasks.
    `execution` says what the engine runs on and how."""
    stats = engine.stats()
    return {
        "replica_id": replica_id,
        "pid": os.getpid(),
        "live_turns": num_live,
        "links": num_links,
        "tasks": len(asyncio.all_tasks()),
        **asdict(stats),
        "pages": _pages(stats.pages),
        "window_pages": None if stats.window_pages is None else _pages(stats.window_pages),
        "execution": engine.describe(),
    }


def execution_line(engine: Engine) -> str:
    """What the engine runs on and how, as a line for the log."""
    return ", ".join(f"{name} {value}" for name, value in engine.describe().items())


def _pages(pages: PageAccounts) -> dict[str, int]:
    return asdict(pages) | {"leaked": pages.leaked}


def _sampling_of(model: ModelArgs) -> SamplingDefaults:
    if model.generation_config == "off":
        return SamplingDefaults()
    settings = model.settings()
    return sampling_defaults(find_model(settings.path, settings.revision))


def _served_model(text: TextProcessor, engine: Engine) -> ServedModel:
    weights = engine.describe().get("model_fingerprint")
    return ServedModel(text.fingerprint(None if weights is None else str(weights)), engine.vocab_size)


def _warm(text: TextProcessor) -> None:
    """Compiles the chat template now rather than at the first request."""
    try:
        text.encode_prompt(ChatPrompt(({"role": "user", "content": "hello"},)))
    except InvalidRequest as error:
        logger.info("no chat: %s", error.message)
