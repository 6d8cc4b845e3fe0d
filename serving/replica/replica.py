"""LLMReplica: one engine with its sessions, as a Ray Serve deployment. It keeps the parts running.

The engine runs on its own thread; everything else runs on the actor's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from controllers.errors import ControllerError
from controllers.served_model import ServedModel
from engine.api import Engine, EngineError, InvalidRequest
from engine.models.hub import find_model
from serving.background import BackgroundTasks
from serving.grammars.constraints import ConstraintCompiler
from serving.logs.call_facts import CALL_FACTS, CallFacts
from serving.replica.autoscaling_policy import ReplicaLoad
from serving.replica.drain import HAND_OVER_INTERVAL_S
from serving.replica.engine_answers import ENGINE_TIMEOUT_S
from serving.replica.engine_factory import EngineFactory
from serving.replica.engine_watch import WATCH_INTERVAL_S, EngineWatch
from serving.replica.environment import ReplicaEnvironment
from serving.replica.generation_config import sampling_defaults
from serving.replica.kv_watch import LOOK_INTERVAL_S
from serving.replica.link_server import TICK_S, Emit, LinkServer
from serving.replica.mailbox import Mailbox
from serving.replica.parts import ReplicaParts
from serving.settings.config import AppArgs
from serving.settings.model_args import ModelArgs
from serving.text.chat_template import TemplateRefused
from serving.text.text import TextProcessor
from serving.trace.opening import open_spans
from serving.wire.calls import AnyCall, RunTurn, answer_of
from serving.wire.controller_calls import CONTROLLER_TIMEOUT_S, once_up
from serving.wire.errors import error_event, error_info, unavailable
from serving.wire.turns import ChatPrompt, SamplingDefaults, ServiceError, TurnEvent

logger = logging.getLogger(__name__)
serve_logger = logging.getLogger("ray.serve")  # its records of level INFO reach the replica's log

ENGINE_STOP_TIMEOUT_S = 5.0
GAUGE_INTERVAL_S = 5.0
HAND_OVER_TIMEOUT_S = 60.0
RETIRE_SHARE = 0.9
"""The share of Serve's shutdown timeout for ending turns and handing over sessions. At the timeout Serve ends the
process, whatever is left."""


class LLMReplica:
    """A replica's actor. Front ends call it over their links. Errors are sent as data (ErrorInfo).

    `make_environment` builds the replica's environment; it is called in the replica's process.
    """

    async def __init__(  # type: ignore[misc]
        self,
        args: AppArgs,
        build_engine: EngineFactory,
        make_environment: Callable[[AppArgs], Awaitable[ReplicaEnvironment]],
    ) -> None:
        self._opened = AsyncExitStack()  # what the end of the replica closes, the last first
        self._args = args
        self._tasks = BackgroundTasks()
        mailbox = Mailbox(asyncio.get_running_loop())
        settings = args.engine_settings()
        # Meanwhile the replica waits for the controller, which may only be starting.
        building = asyncio.create_task(asyncio.to_thread(build_engine, settings, mailbox.deliver))
        self._opened.push_async_callback(_stop_engine, building)
        self._environment = environment = await make_environment(args)
        self._opened.callback(environment.controller.close)
        self._opened.push_async_callback(environment.listener.close)
        self._engine = engine = await building
        self._text = text = await asyncio.to_thread(environment.load_text, settings.model, engine)
        sampling = await asyncio.to_thread(_sampling_of, args.model)
        self._links = LinkServer(environment.listener, self.serve, self._tasks)
        spans = open_spans(args.tracing, "replica", environment.replica_id)
        if spans is not None:
            self._opened.push_async_callback(asyncio.to_thread, spans.close)
        self._opened.push_async_callback(self._tasks.stop, ENGINE_STOP_TIMEOUT_S)
        self._parts = ReplicaParts(
            args,
            environment,
            engine,
            mailbox,
            self._tasks,
            self._links,
            text=text,
            constraints=ConstraintCompiler(text.tokenizer, engine.vocab_size),
            model=_served_model(text, engine),
            sampling=sampling,
            spans=spans,
        )
        self._watch = EngineWatch(engine, self._parts.heartbeats, step_timeout_s=args.replicas.step_timeout_s)
        self._opened.push_async_callback(self._retire)
        await self._start()

    async def serve(self, call: AnyCall, emit: Emit) -> None:
        """Carries out a front end's call. Errors are sent as answers."""
        if isinstance(call, RunTurn):
            await self._turn(call, emit)
            return
        try:
            emit(answer_of(await self._parts.calls.answer(call)))
        except (ControllerError, EngineError, ServiceError) as error:
            emit(answer_of(error_info(error)))
        except Exception as error:
            logger.exception("%s failed", type(call).__name__)
            emit(answer_of(error_info(error)))

    async def _turn(self, call: RunTurn, emit: Emit) -> None:
        """Runs a turn, see TurnRunner.run. A drained replica takes no turns, not even while it still runs some. Front
        ends leave it, and Serve replaces it."""
        if self._parts.drain.emptied:
            self._parts.metrics.turn_ended("moved")
            emit(TurnEvent(error=unavailable("the replica is drained")))
            return
        # Each call runs in a task of its own.
        CALL_FACTS.set(CallFacts.at_replica(call.turn, self._environment.replica_id, call.epoch))
        try:
            emit(await self._parts.turns.run(call.turn, call.epoch, emit))
        except Exception as error:
            logger.exception("request %s failed", call.turn.request_id)
            emit(error_event(error))
        finally:
            self._parts.drain.answered()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """This replica's load. Ray Serve calls this if `replicas.autoscaling` is set."""
        stats = self._engine.stats()
        return ReplicaLoad(stats.running + stats.waiting, stats.kv_utilization).stats()

    async def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises."""
        if fault := self._watch.fault:
            raise RuntimeError(fault)
        if self._parts.drain.drained:
            raise RuntimeError("drained, as an operator asked for")

    async def __del__(self) -> None:
        """Stops the replica. Serve also calls this after `__init__` has raised, at any of its lines: that error must
        stay the visible one."""
        opened: AsyncExitStack | None = getattr(self, "_opened", None)
        if opened is not None:
            await opened.aclose()

    async def _retire(self) -> None:
        await self._parts.drain.retire(RETIRE_SHARE * self._args.replicas.graceful_shutdown_timeout_s)
        await self._parts.heartbeats.farewell()

    async def _start(self) -> None:
        await asyncio.to_thread(_warm, self._text, self._args.model.model_id)
        self._environment.settle()
        self._engine.start()
        serve_logger.info("replica %s: %s", self._environment.replica_id, execution_line(self._engine))
        self._parts.heartbeats.address = self._environment.listener.open(self._links.frame_came)
        controller, sessions = self._args.controller, self._args.sessions
        # Each by itself: a shard that does not answer must not delay others.
        for shard in range(controller.shards):
            beat = partial(self._parts.heartbeats.beat, shard)
            self._tasks.every(controller.heartbeat_interval_s, beat, timeout_s=controller.replica_timeout_s)
        self._tasks.every(
            sessions.sweep_interval_s, self._parts.host.expire_idle, timeout_s=CONTROLLER_TIMEOUT_S
        )
        self._tasks.every(
            sessions.sweep_interval_s, self._parts.unnamed.expire_idle, timeout_s=CONTROLLER_TIMEOUT_S
        )
        self._tasks.every(HAND_OVER_INTERVAL_S, self._hand_over, timeout_s=HAND_OVER_TIMEOUT_S)
        self._tasks.every(WATCH_INTERVAL_S, self._watch.look, timeout_s=CONTROLLER_TIMEOUT_S)
        self._tasks.every(LOOK_INTERVAL_S, self._parts.kv_watch.look, timeout_s=3 * ENGINE_TIMEOUT_S)
        self._tasks.every(TICK_S, self._links.watch, timeout_s=TICK_S)
        self._tasks.every(GAUGE_INTERVAL_S, self._publish_gauges, timeout_s=GAUGE_INTERVAL_S)
        await once_up(self._join)  # a shard that answers has sessions here while another one is waited for

    async def _join(self) -> None:
        """Registers with the controller. Raises SettingsRefused."""
        await self._environment.controller.announce()
        await self._environment.controller.register_replica(self._parts.heartbeats.status())

    async def _hand_over(self) -> None:
        await self._parts.drain.hand_over()
        if self._parts.drain.end_if_empty():
            await self._parts.heartbeats.farewell()

    async def _publish_gauges(self) -> None:
        self._environment.publish_gauges(self._engine.stats())


async def _stop_engine(building: asyncio.Task[Engine]) -> None:
    """Stops the engine once it is built, if it could be."""
    await asyncio.wait([building])
    if building.cancelled() or building.exception() is not None:
        return
    try:
        await asyncio.to_thread(building.result().stop, ENGINE_STOP_TIMEOUT_S)
    except (EngineError, TimeoutError) as error:
        logger.error("the engine did not stop: %s", error)


def execution_line(engine: Engine) -> str:
    """What the engine runs on and how, as a line for the log."""
    return ", ".join(f"{name} {value}" for name, value in engine.describe().items())


def _sampling_of(model: ModelArgs) -> SamplingDefaults:
    if model.generation_config == "off":
        return SamplingDefaults()
    settings = model.settings()
    return sampling_defaults(find_model(settings.path, settings.revision))


def _served_model(text: TextProcessor, engine: Engine) -> ServedModel:
    weights = engine.describe().get("model_fingerprint")
    return ServedModel(text.fingerprint(None if weights is None else str(weights)), engine.vocab_size)


def _warm(text: TextProcessor, model_id: str) -> None:
    """Compiles the chat template now rather than at the first request. One that fails is told, not refused: the model
    may be used without chats, and some templates want more than a plain question."""
    try:
        text.encode_prompt(ChatPrompt(({"role": "user", "content": "hello"},)))
    except TemplateRefused as error:
        serve_logger.warning("model %s: a chat of one question fails: %s", model_id, error.message)
    except InvalidRequest as error:
        serve_logger.info("model %s: no chat: %s", model_id, error.message)
