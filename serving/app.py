"""The application that `serve run configs/cluster.yaml` builds: engine replicas behind an HTTP ingress."""

from __future__ import annotations

import logging
import os
import uuid
from functools import partial
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.deployment import Application

from serving.debug.loopback import host_of_serve
from serving.front.ingress import Ingress
from serving.front.ingress import environment_in_serve as ingress_environment
from serving.keys import KeyRing
from serving.logs.serve_log import deployment_options
from serving.replica.engine_factory import EngineFactory, build_local_engine
from serving.replica.environment import environment_in_serve as replica_environment
from serving.replica.rank_actors import ParallelEngineFactory, placement_options
from serving.replica.replica import LLMReplica
from serving.settings.config import AppArgs, parse_args
from serving.settings.replica_args import ReplicaArgs
from serving.wire.controller_calls import announce_at_deploy

HEALTH_CHECK_PERIOD_S = 1.0
HEALTH_CHECK_TIMEOUT_S = 10.0
LOOKS_FOR_CALLS_S = 0.1
"""How often Serve checks whether a stopping replica still has calls of Serve's own. These are short. Only when there
are none, Serve tells the replica to end."""
INGRESS_SURGE_PERCENT = 100
"""In an update, new front ends start before the old ones stop: a front end needs little memory."""

SLOWER = (
    "Ray Serve's own proxy takes the calls. HAProxy in its place is faster: `kedge serve` puts it there, and"
    " docs/operations/haproxy.md says how it is done on a cluster of your own."
)

logger = logging.getLogger("ray.serve")


def build(values: dict[str, Any]) -> Application:
    """Builds the application for Ray Serve from `args` of the config file. Raises SettingsError before any replica
    starts."""
    args = parse_args(values)
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
        logger.warning(SLOWER)
    if args.debug.faults:
        args.refuse_faults_in_the_open(host_of_serve())
    # Each ingress reads its own environment. If this one is the same, a bad key shows before anything starts.
    KeyRing(os.environ)
    if args.execution.tensor_parallel == 1:
        return compose(args, build_local_engine)
    return compose(args, ParallelEngineFactory(args.replicas.num_cpus, args.replicas.num_gpus))


def compose(args: AppArgs, engine_factory: EngineFactory) -> Application:
    """The application with any engine. Raises SettingsError for settings that the running controller cannot change."""
    deployment = args.deployment(uuid.uuid4().hex)
    announce_at_deploy(args.controller.name, deployment)
    replicas = serve.deployment(LLMReplica).options(
        name="LLMReplica",
        **_number_of(args.replicas),
        ray_actor_options={"num_cpus": args.replicas.num_cpus, "num_gpus": args.replicas.num_gpus},
        graceful_shutdown_timeout_s=args.replicas.graceful_shutdown_timeout_s,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        **deployment_options(args.logs),
        graceful_shutdown_wait_loop_s=LOOKS_FOR_CALLS_S,
        max_surge_percent=args.replicas.surge_percent,
        **placement_options(args),
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="Ingress",
        num_replicas=args.ingress.count,
        ray_actor_options={"num_cpus": args.ingress.num_cpus},
        max_ongoing_requests=args.ingress.max_ongoing_requests,
        graceful_shutdown_timeout_s=args.ingress.graceful_shutdown_timeout_s,
        **deployment_options(args.logs),
        max_surge_percent=INGRESS_SURGE_PERCENT,
    )
    engines = replicas.bind(args, engine_factory, partial(replica_environment, deployment=deployment))
    application: Application = ingress.bind(
        args, engines, partial(ingress_environment, deployment=deployment)
    )
    return application


def _number_of(replicas: ReplicaArgs) -> dict[str, Any]:
    """The number of replicas, as an option of Ray Serve's deployment. Autoscaling has no initial number, so that a new
    deployment keeps the number of replicas that run."""
    autoscaling = replicas.autoscaling
    if autoscaling is None:
        return {"num_replicas": replicas.count}
    policy = AutoscalingPolicy(
        policy_function="serving.replica.autoscaling_policy:LoadPolicy",
        policy_kwargs=autoscaling.model_dump(include={"target_turns_in_flight", "target_kv_utilization"}),
    )
    bounds = autoscaling.model_dump(
        include={"min_replicas", "max_replicas", "upscale_delay_s", "downscale_delay_s"}
    )
    look_back = {"look_back_period_s": autoscaling.look_back_s}
    return {"autoscaling_config": AutoscalingConfig(**bounds, **look_back, policy=policy)}
