"""The HTTP front end as a Ray Serve deployment: any number of ingresses. Each has its clients' turns and its counts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from controllers.records import ReplicaAddress
from controllers.settings import Deployment
from serving.background import BackgroundTasks
from serving.front.api.body_limits import BodyLimits
from serving.front.api.browsers import BrowserRules
from serving.front.api.responses.background import BackgroundResponses
from serving.front.api.rules import AffinityRules, ApiRules
from serving.front.api.service import TurnService
from serving.front.cluster_client import FIGURES_TIMEOUT_S, ClusterClient
from serving.front.departure import LOOK_INTERVAL_S as LOOK_FOR_DEPARTURE_S
from serving.front.departure import Departure
from serving.front.http import create_http_app
from serving.front.known_places import KnownPlaces
from serving.front.membership import LOOK_INTERVAL_S
from serving.front.operator_port import OperatorPort
from serving.front.ownership_cache import OwnershipCache
from serving.front.recorder import Recorder
from serving.front.replica_calls import HasDied, OpenConnection, ReplicaCalls
from serving.front.replica_link import LinkTimes
from serving.front.served_model import served_model
from serving.front.session_owners import SessionOwners
from serving.front.siblings import Siblings
from serving.front.turn_dispatch import TurnDispatcher
from serving.garbage import settle
from serving.keys import KeyRing
from serving.logs.serve_log import log_with_serve
from serving.settings.config import AppArgs
from serving.trace.opening import front_traces, open_spans
from serving.watch.metrics import IngressMetrics
from serving.wire.connections import ConnectionFactory
from serving.wire.controller_calls import (
    CONTROLLER_TIMEOUT_S,
    ControllerCalls,
    connect_controller,
    once_up,
)
from serving.wire.link_keys import CurveKeys
from serving.wire.turns import ModelInfo

logger = logging.getLogger(__name__)

REOPEN_SHARE = 0.1
"""The share of `failover_timeout_s` for which a broken connection may be reopened before its replica counts as lost."""

CALL_TIMEOUT_S = CONTROLLER_TIMEOUT_S + 3.0
"""A replica that waits for the controller has the time to say that it does not answer."""
START_TIMEOUT_S = 900.0
EXPIRE_INTERVAL_S = 15.0
CACHED_OWNERS = 100_000
CACHED_PLACES = 200_000
"""Places in conversations, two of each conversation: some 35 MB."""
STOP_TIMEOUT_S = 5.0
"""How long responses that are broken off may take to write their ends to the session log."""
RELOAD_KEYS_INTERVAL_S = 2.0
LEARN_MODEL_INTERVAL_S = 2.0
RELOAD_KEYS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class IngressEnvironment:
    """What an ingress gets from the process that it runs in. `ingresses` is the handle of its own deployment; `settle`
    is called once everything is loaded."""

    ingress_id: str
    controller: ControllerCalls
    ingresses: DeploymentHandle
    open_connection: OpenConnection
    has_died: HasDied
    random: Random
    settle: Callable[[], None]


class Ingress:
    """Wires the HTTP application to the cluster. Ready once a replica has answered.

    `make_environment` makes the IngressEnvironment, in the ingress's own process.
    """

    async def __init__(  # type: ignore[misc]
        self,
        args: AppArgs,
        _replicas: DeploymentHandle,
        make_environment: Callable[[AppArgs], Awaitable[IngressEnvironment]],
    ) -> None:
        self._keys = KeyRing(os.environ, args.ingress.keys_path)
        self._args = args
        environment = await make_environment(args)
        self._tasks = BackgroundTasks()
        controller = environment.controller
        metrics = self._metrics = IngressMetrics(environment.ingress_id, args.metric_labels)
        self._spans = open_spans(args.tracing, "ingress", environment.ingress_id)
        cache = OwnershipCache(CACHED_OWNERS)
        places = _known_places(args)
        calls = self._replicas = ReplicaCalls(
            controller,
            environment.open_connection,
            environment.has_died,
            self._tasks,
            environment.random,
            times=LinkTimes(reopen_s=REOPEN_SHARE * args.ingress.failover_timeout_s),
            call_timeout_s=CALL_TIMEOUT_S,
            on_broken=metrics.connection_broke,
            on_gone=_forgets(cache, places),
        )
        metrics.read(calls.figures)
        self._tasks.every(LOOK_INTERVAL_S, calls.look, timeout_s=CONTROLLER_TIMEOUT_S)
        owners = SessionOwners(
            calls, controller, cache, places, metrics, failover_timeout_s=args.ingress.failover_timeout_s
        )
        traces = front_traces(self._spans, args.model.model_id)
        dispatcher = self._dispatcher = TurnDispatcher(calls, owners, places, metrics, traces=traces)
        siblings = Siblings(environment.ingresses, FIGURES_TIMEOUT_S)
        self._background = BackgroundResponses(siblings, most=args.ingress.max_background_responses)
        self._service = ClusterClient(
            model=await _first_model(calls),
            replicas=calls,
            siblings=siblings,
            controller=controller,
            owners=owners,
            dispatcher=dispatcher,
            places=places,
            metrics=metrics,
            settings=args.model_dump(mode="json"),
            replicas_expected=args.replicas_expected,
            tasks=self._tasks,
        )
        self._departure = Departure(siblings, metrics.ingress_id)
        self._tasks.every(LOOK_FOR_DEPARTURE_S, self._look_for_departure, timeout_s=2 * FIGURES_TIMEOUT_S)
        self._expire_idle_sessions(controller)
        self._tasks.every(LEARN_MODEL_INTERVAL_S, self._service.learn_model, timeout_s=2 * FIGURES_TIMEOUT_S)
        self._tasks.every(RELOAD_KEYS_INTERVAL_S, self._reload_keys, timeout_s=RELOAD_KEYS_TIMEOUT_S)
        self._operator_port = self._opened_for_operators()
        environment.settle()

    async def _look_for_departure(self) -> None:
        watched = self._service.is_watched or not self._departure.was_listed
        if watched and await self._departure.is_near():
            self._service.end_watching()

    def _expire_idle_sessions(self, controller: ControllerCalls) -> None:
        """Ends idle sessions that have no owner; owners end their own. It is harmless to do this twice."""

        async def expire_idle() -> None:
            while await controller.expire_idle():  # a call ends some of them
                pass

        self._tasks.every(EXPIRE_INTERVAL_S, expire_idle, timeout_s=CONTROLLER_TIMEOUT_S)

    def _opened_for_operators(self) -> OperatorPort | None:
        args = self._args.ingress
        if args.operator_port is None:
            return None
        address = (args.operator_host, args.operator_port)
        return OperatorPort(self._app(operators=True, tells_id=True), address)

    @property
    def service(self) -> TurnService:
        """The service that the protocols use."""
        return self._service

    async def abort(self, request_id: str | None, tenant: str) -> None:
        """Aborts turns of this ingress's clients, see TurnDispatcher.abort."""
        self._dispatcher.abort(request_id, tenant)

    async def background_response(
        self, response_id: str, tenant: str, num_seen: int, cancel: bool
    ) -> tuple[str, str, bool] | None:
        """The state of a background response that runs here, see BackgroundResponses.here."""
        return await self._background.here(response_id, tenant, num_seen, cancel=cancel)

    async def _reload_keys(self) -> None:
        await asyncio.to_thread(self._keys.reload)

    async def describe(self) -> dict[str, Any]:
        """Figures for /get_server_info, ready for JSON. `tasks`: how many the event loop has. `proxy`: what accepts
        HTTP calls in front of this ingress, HAProxy or Ray Serve's own proxy."""
        return {
            "ingress_id": self._metrics.ingress_id,
            "pid": os.getpid(),
            "tasks": len(asyncio.all_tasks()),
            "proxy": "haproxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "ray",
        }

    async def metrics_text(self) -> tuple[str, str]:
        """This ingress's id and what it has counted."""
        return self._metrics.ingress_id, self._metrics.render()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app(operators=self._operator_port is None, tells_id=False)

    def _app(self, *, operators: bool, tells_id: bool) -> FastAPI:
        args = self._args.ingress
        app = create_http_app(
            self._service,
            keys=self._keys,
            rules=self._rules(),
            max_websockets=args.max_websockets,
            browser_rules=BrowserRules(args.allowed_hosts, args.allowed_origins),
            operators=operators,
            background=self._background,
            metrics=self._metrics,
            recorder=Recorder(self._args.logs, self._spans, tells_id),
        )
        if self._args.debug.faults:
            from serving.front.fault_calls import fault_routes  # loaded only here

            app.include_router(fault_routes(self._replicas, self._args.controller.actor_names()))
        return app

    def _rules(self) -> ApiRules:
        args, api, affinity = self._args.ingress, self._args.api, self._args.sessions.unnamed.affinity
        return ApiRules(
            ignore_unknown_fields=api.unknown_fields == "ignore",
            request_chat_template=api.request_chat_template,
            request_priority=api.request_priority,
            incremental_streaming_output=args.incremental_streaming_output,
            affinity_rules=AffinityRules(affinity.user, affinity.cookie),
            body_limits=lambda: BodyLimits.of_context(
                self._service.model.max_context_len, args.max_body_bytes
            ),
            keep_alive_s=args.keep_alive_s,
        )

    async def __del__(self) -> None:
        """Stops everything. Serve also calls this after `__init__` has raised; that error must stay the one seen."""
        replicas: ReplicaCalls | None = getattr(self, "_replicas", None)
        if replicas is None:
            return
        if (operators := getattr(self, "_operator_port", None)) is not None:
            await operators.stop()
        if (background := getattr(self, "_background", None)) is not None:
            patience_s = self._args.ingress.graceful_shutdown_timeout_s / 2
            await background.stop(patience_s=patience_s, timeout_s=STOP_TIMEOUT_S)
        await self._tasks.stop(timeout_s=1.0)
        replicas.stop()
        if (spans := getattr(self, "_spans", None)) is not None:
            await asyncio.to_thread(spans.close)


async def environment_in_serve(args: AppArgs, *, deployment: Deployment) -> IngressEnvironment:
    """The environment of an ingress that runs as a replica of Ray Serve. Waits for the controller, see once_up."""
    log_with_serve(args.logs)
    itself = serve.get_replica_context()
    controller = connect_controller(args.controller.name, deployment)
    keys = CurveKeys.of_secret(await once_up(controller.link_secret))
    return IngressEnvironment(
        ingress_id=itself.replica_id.unique_id,
        controller=controller,
        ingresses=serve.get_deployment_handle(itself.deployment),
        open_connection=ConnectionFactory(ray.get_runtime_context().get_node_id(), keys).open,
        has_died=actor_has_died,
        random=Random(),
        settle=settle,
    )


def _known_places(args: AppArgs) -> KnownPlaces:
    unnamed = args.sessions.unnamed
    return KnownPlaces(
        CACHED_PLACES,
        unnamed=unnamed.enabled,
        shared=args.ingress.count > 1,
        durable_timeout_s=unnamed.idle_timeout_s if unnamed.durable else None,
    )


def _forgets(cache: OwnershipCache, places: KnownPlaces) -> Callable[[str], None]:
    def forget(replica_id: str) -> None:
        cache.forget_replica(replica_id)
        places.forget_replica(replica_id)

    return forget


async def actor_has_died(address: ReplicaAddress) -> bool:
    """Whether the actor's process has ended: Ray frees the actor's name then."""
    try:
        await asyncio.to_thread(ray.get_actor, address.actor, namespace=address.namespace)
    except ValueError:
        return True
    return False


async def _first_model(calls: ReplicaCalls) -> ModelInfo:
    """The served model. Asks until a replica answers: models may take minutes to load."""
    waits = False
    async with asyncio.timeout(START_TIMEOUT_S):
        while (model := await served_model(calls, FIGURES_TIMEOUT_S)) is None:
            if not waits:
                logger.info("waiting for a replica")
            waits = True
            await asyncio.sleep(0.5)
    return model
