"""What a replica gets from its surroundings, which are Ray Serve or a test."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import ray
from ray import serve

from controllers.records import ReplicaAddress
from controllers.settings import Deployment
from engine.api import Engine, EngineStats
from engine.models.hub import find_model
from engine.settings import ModelSettings
from serving.garbage import settle
from serving.logs.serve_log import log_with_serve
from serving.replica.link_server import PeerConnections
from serving.settings.config import AppArgs
from serving.text.text import TextProcessor
from serving.watch.metrics import EndedTurn, nothing_told
from serving.watch.ray_gauges import RayGauges
from serving.watch.ray_llm import RayLLM
from serving.wire.controller_calls import ControllerCalls, connect_controller, once_up
from serving.wire.link_keys import CurveKeys
from serving.wire.peer_sockets import PeerSockets, TakeFrame


class Listener(PeerConnections, Protocol):
    """The sockets that front ends connect to."""

    def open(self, frame_came: TakeFrame) -> ReplicaAddress: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplicaEnvironment:
    """What a replica gets from its surroundings. `clock` returns monotonic seconds, `unix_clock` Unix time. `settle` is
    called once everything is loaded, `turn_ended` for each turn that the engine has ended."""

    replica_id: str
    controller: ControllerCalls
    listener: Listener
    publish_gauges: Callable[[EngineStats], None]
    load_text: Callable[[ModelSettings, Engine], TextProcessor]
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    settle: Callable[[], None]
    turn_ended: Callable[[EndedTurn], None] = nothing_told


async def environment_in_serve(args: AppArgs, *, deployment: Deployment) -> ReplicaEnvironment:
    """The environment of a replica in Ray Serve. Waits for the controller, see once_up."""
    log_with_serve(args.logs)
    controller = connect_controller(args.controller.name, deployment)
    context = ray.get_runtime_context()
    gauges, names = RayGauges(), args.metrics.ray_llm_names
    boards = None if names == "none" else RayLLM(names, args.model.model_id)

    def published(stats: EngineStats) -> None:
        gauges.publish(stats)
        if boards is not None:
            boards.publish(stats)

    return ReplicaEnvironment(
        replica_id=serve.get_replica_context().replica_id.unique_id,
        controller=controller,
        listener=PeerSockets(
            ray.util.get_node_ip_address(),
            (CurveKeys.of_secret(await once_up(controller.link_secret)).public,),
            node_id=context.get_node_id(),
            make_address=partial(ReplicaAddress, actor=context.get_actor_name(), namespace=context.namespace),
        ),
        publish_gauges=published,
        turn_ended=nothing_told if boards is None else boards.ended,
        load_text=_load_text,
        clock=time.monotonic,
        unix_clock=time.time,
        settle=settle,
    )


def _load_text(model: ModelSettings, engine: Engine) -> TextProcessor:
    directory = find_model(model.path, model.revision)
    return TextProcessor.load(
        str(directory), vocab_size=engine.vocab_size, max_context_len=engine.max_context_len
    )
