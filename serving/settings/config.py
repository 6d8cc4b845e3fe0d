"""Settings of an application, as `args` of configs/cluster.yaml: validated once at start, never changed.

Unknown keys are refused with the key's name and the nearest valid one; Ray Serve itself would accept them silently.
Models convert to the frozen dataclasses that the engine and the controller take.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from controllers.settings import ClusterSettings, Deployment
from engine.settings import EngineSettings, ExecutionSettings, SchedulerSettings
from serving.debug.loopback import refuse_faults_in_the_open
from serving.settings.cache_args import CacheArgs
from serving.settings.controller_args import STATE_DIR, ControllerArgs
from serving.settings.engine_args import ExecutionArgs, SchedulerArgs, SpeculationArgs
from serving.settings.ingress_args import ApiArgs, IngressArgs
from serving.settings.model_args import ModelArgs
from serving.settings.record_args import LogsArgs, MetricsArgs, TracingArgs
from serving.settings.replica_args import ReplicaArgs
from serving.settings.session_args import RebalancingArgs, SessionArgs, TenantArgs
from serving.settings.settings_file import ServeFile, read_file
from serving.settings.settings_paths import state_path
from serving.settings.strict_settings import SettingsError, StrictModel, faults


class DebugArgs(StrictModel):
    """For tests and demonstrations."""

    faults: bool = Field(
        default=False,
        description="""Operators may [plant faults](operations/planted-faults.md). Refused unless only
        this machine can call. A proxy on this machine must not pass on `/v1/kedge/debug/`.""",
    )


class AppArgs(StrictModel):
    """Everything `serving.app:build` takes."""

    model: ModelArgs
    cache: CacheArgs = CacheArgs()
    scheduler: SchedulerArgs = SchedulerArgs()
    speculation: SpeculationArgs = SpeculationArgs()
    execution: Annotated[ExecutionArgs, Field(validate_default=True)] = ExecutionArgs()
    replicas: Annotated[ReplicaArgs, Field(validate_default=True)] = ReplicaArgs()
    ingress: IngressArgs = IngressArgs()
    api: ApiArgs = ApiArgs()
    sessions: SessionArgs = SessionArgs()
    tenants: TenantArgs = TenantArgs()
    rebalancing: RebalancingArgs = RebalancingArgs()
    controller: ControllerArgs = ControllerArgs()
    debug: DebugArgs = DebugArgs()
    metrics: MetricsArgs = MetricsArgs()
    tracing: TracingArgs = TracingArgs()
    logs: LogsArgs = LogsArgs()

    @field_validator("execution")
    @classmethod
    def _fits_the_others(cls, execution: ExecutionArgs, info: ValidationInfo) -> ExecutionArgs:
        """Sections that are at fault themselves are not in `info`, and told apart."""
        reasons = execution.conflicts(info.data.get("model"), info.data.get("cache"))
        if reasons:
            raise ValueError("; ".join(reasons))
        return execution

    @field_validator("replicas")
    @classmethod
    def _room_for_ranks(cls, replicas: ReplicaArgs, info: ValidationInfo) -> ReplicaArgs:
        """A rank is a process of its own, and on GPUs each needs one."""
        execution, model = info.data.get("execution"), info.data.get("model")
        if model is not None and model.device == "cpu" and replicas.num_gpus:
            raise ValueError(f"num_gpus {replicas.num_gpus:g} reserves what model.device 'cpu' does not use")
        if execution is None or model is None or execution.tensor_parallel == 1:
            return replicas
        if model.device == "cuda" and replicas.num_gpus != 1:
            raise ValueError(
                f"execution.tensor_parallel takes num_gpus 1, for each rank, not {replicas.num_gpus:g}"
            )
        if replicas.num_cpus == replicas.num_gpus == 0:
            raise ValueError("execution.tensor_parallel needs num_cpus or num_gpus, for each rank")
        return replicas

    def refuse_faults_in_the_open(self, http_host: str | None) -> None:
        """`http_host` is where Ray Serve listens; None: it does not. Raises SettingsError."""
        if self.debug.faults:
            refuse_faults_in_the_open(
                {"http_options.host": http_host, "ingress.operator_host": self.ingress.operator_host}
            )

    @property
    def metric_labels(self) -> dict[str, str]:
        """Those that every metric of the cluster has."""
        return {"cluster": self.metrics.cluster_name, "model": self.model.model_id}

    @property
    def replicas_expected(self) -> int:
        """With autoscaling the fewest that there should be."""
        scaling = self.replicas.autoscaling
        return self.replicas.count if scaling is None else scaling.min_replicas

    @property
    def settings_hash(self) -> str:
        """Equal for equal settings, in any process."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=8).hexdigest()

    def engine_settings(self) -> EngineSettings:
        """The frozen settings of one replica's engine."""
        return EngineSettings(
            model=self.model.settings(),
            cache=self.cache.settings(),
            scheduler=SchedulerSettings(**self.scheduler.model_dump()),
            speculation=self.speculation.settings(),
            execution=ExecutionSettings(**self.execution.model_dump()),
        )

    def cluster_settings(self) -> ClusterSettings:
        """The frozen settings of the cluster controller."""
        controller = self.controller
        return ClusterSettings(
            replica_timeout_s=controller.replica_timeout_s,
            heartbeat_interval_s=controller.heartbeat_interval_s,
            session_timeout_s=self.sessions.idle_timeout_s,
            max_sessions=controller.max_sessions,
            rebalancing=self.rebalancing.settings(),
            max_timeout_s=self.sessions.max_timeout_s,
            tenant_sessions=self.tenants.max_sessions,
            tenant_history_tokens=self.tenants.max_history_tokens,
        )

    def deployment(self, deployment_id: str) -> Deployment:
        """What a deployment with these settings tells the cluster controller."""
        return Deployment(deployment_id, self.cluster_settings(), self.controller.log_settings())


def parse_args(values: Any) -> AppArgs:
    """Validates application args; raises SettingsError that names every key at fault on a line of its own."""
    try:
        return AppArgs.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n  ".join(["bad application settings:", *faults(error, "args")])) from None


def check_file(path: str) -> list[AppArgs]:
    """The valid args of every application in a `serve run` config file. Raises what `read_file` and
    `check_applications` raise."""
    return check_applications(read_file(path))


def check_applications(file: ServeFile) -> list[AppArgs]:
    """Validates the args of every application in the file, and that none has another's sessions or port, or Ray
    Serve's. Raises SettingsError."""
    applications = [parse_args(args) for args in file.args]
    for application in applications:
        application.refuse_faults_in_the_open(file.http_host)
    controllers = [application.controller for application in applications]
    in_files = [controller for controller in controllers if controller.redis_url is None]
    ingresses = [application.ingress for application in applications]
    own: dict[str, list[Any]] = {
        "controller.name": [name for controller in controllers for name in controller.actor_names()],
        STATE_DIR: [str(state_path(controller.state_dir, f"args.{STATE_DIR}")) for controller in in_files],
        "ingress.operator_port": [each.operator_port for each in ingresses if each.operator_port is not None],
    }
    for key, values in own.items():
        shared = next((value for value in values if values.count(value) > 1), None)
        if shared is not None:
            raise SettingsError(f"two applications have the args.{key} {shared!r}; each needs its own")
    if file.http_port in own["ingress.operator_port"]:
        raise SettingsError(
            f"args.ingress.operator_port: {file.http_port} is http_options.port, which takes everybody's calls"
        )
    return applications


def main(paths: list[str]) -> int:
    """`python -m serving.settings.config FILE...`: 0 if all files are good, else 2 and the reasons on stderr."""
    if not paths:
        sys.stderr.write("usage: python -m serving.settings.config FILE...\n")
        return 2
    for path in paths:
        try:
            check_file(path)
        except (SettingsError, OSError, yaml.YAMLError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
