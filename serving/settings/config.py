"""Settings of an application, as `args` of configs/cluster.yaml: validated once at start, never changed.

Unknown keys are refused with the key's name and the nearest valid one; Ray Serve itself would accept them silently.
Models convert to the frozen dataclasses that the engine and the controller take.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from controllers.session_log.redis_url import check_redis_url
from controllers.settings import (
    REDIS_PASSWORD,
    ClusterSettings,
    Deployment,
    LogSettings,
    RebalancingSettings,
    RedisLogSettings,
    SqliteLogSettings,
)
from controllers.shards import shard_name
from engine.settings import EngineSettings, ExecutionSettings, SchedulerSettings
from serving.debug.loopback import refuse_faults_in_the_open
from serving.settings.engine_args import CacheArgs, ExecutionArgs, ModelArgs, SchedulerArgs, SpeculationArgs
from serving.settings.record_args import LogsArgs, TracingArgs
from serving.settings.replica_args import ReplicaArgs
from serving.settings.settings_file import read_file
from serving.settings.settings_paths import resolve_path, state_path
from serving.settings.strict_settings import (
    Interval,
    NotEmpty,
    PositiveInt,
    Seconds,
    SettingsError,
    StrictModel,
    faults,
)

MIB = 1024 * 1024

HostName = Annotated[str, Field(pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
"""A name without a port, in lower case; `*.example.com` is all below that one."""
Origin = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^/\s*]+$")]
"""As browsers send it: scheme, host, and port if it is not the scheme's own."""

REBALANCING = RebalancingSettings()

LOOPBACK = "127.0.0.1"

WAIT_MS = 300
MOST_WAIT_MS = 900
"""Less than the second that the controller waits for any answer of Redis."""
MOST_SHARDS = 64
STATE_DIR = "controller.state_dir"

HEARTBEATS_PER_TIMEOUT = 3
"""One that is late, or lost, does not make a replica dead."""


class IngressArgs(StrictModel):
    """HTTP front ends; any number of them agree, because ownership lives in the controller. One that is to go is listed
    out first, and its streams have `graceful_shutdown_timeout_s` to end. `allowed_hosts` and `allowed_origins` are for
    browsers, see serving/front/api/browsers.py, `keys_file` has hashes of keys, see serving/front/api/keys.py.
    Without `max_body_mib` the model's context says how large a body may be, see serving/front/api/body_limits.py.
    With `incremental_streaming_output` an event of /generate tells what is new, as with SGLang's option.
    What is for operators is taken at their `operator_port` only, if they have one: at the address `operator_host` of
    each machine that has an ingress."""

    count: PositiveInt = 1
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    max_ongoing_requests: PositiveInt = 4096
    max_background_responses: PositiveInt = 256
    failover_timeout_s: Seconds = 30.0
    keep_alive_s: Interval = 5.0
    max_websockets: Annotated[PositiveInt, Field(validate_default=True)] = 1024
    graceful_shutdown_timeout_s: Seconds = 60.0
    allowed_hosts: tuple[HostName, ...] = Field(default=(), strict=False)
    allowed_origins: tuple[Origin, ...] = Field(default=(), strict=False)
    keys_file: NotEmpty | None = None
    incremental_streaming_output: bool = False
    operator_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    operator_host: NotEmpty = LOOPBACK
    max_body_mib: Annotated[float, Field(gt=0, le=1024)] | None = None

    @field_validator("max_websockets")
    @classmethod
    def _beside_other_requests(cls, max_websockets: int, info: ValidationInfo) -> int:
        requests = info.data.get("max_ongoing_requests")
        if requests is not None and max_websockets >= requests:
            raise ValueError(
                f"{max_websockets} is not below max_ongoing_requests, {requests}: each WebSocket is a request in flight"
            )
        return max_websockets

    @field_validator("operator_host")
    @classmethod
    def _of_the_operators_port(cls, host: str, info: ValidationInfo) -> str:
        if host != LOOPBACK and info.data.get("operator_port", 0) is None:
            raise ValueError("is where operator_port listens, and there is no operator_port")
        return host

    @property
    def max_body_bytes(self) -> int | None:
        return None if self.max_body_mib is None else int(self.max_body_mib * MIB)

    @property
    def keys_path(self) -> str | None:
        """Relative to the repository, or to the working directory."""
        return None if self.keys_file is None else resolve_path(self.keys_file)


class AffinityArgs(StrictModel):
    """What, beside `prompt_cache_key`, says which conversations should be at one replica: with `user` the user that a
    request names, and the cookie with the name `cookie`, which should tell browsers apart."""

    user: bool = False
    cookie: Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}$")] | None = None


class UnnamedSessionArgs(StrictModel):
    """Conversations whose clients name no session and send all of it each time. They are recognized, and their KV is
    kept until nobody has gone on with them for `idle_timeout_s`, or others need the room. With `durable` they are kept
    in the session log from their second turn on. So they outlive their replica, and move as other sessions do."""

    enabled: bool = True
    idle_timeout_s: Seconds = 600.0
    durable: bool = False
    affinity: AffinityArgs = AffinityArgs()

    @field_validator("durable")
    @classmethod
    def _only_if_recognized(cls, durable: bool, info: ValidationInfo) -> bool:
        if durable and not info.data.get("enabled", True):
            raise ValueError("needs enabled: true, since only conversations that are recognized are kept")
        return durable


class ApiArgs(StrictModel):
    """What bodies may have. `unknown_fields`: a field that no protocol here knows is refused, or ignored and named in a
    header of the reply; what is known and not supported is refused in any case. With `request_chat_template` a request
    may bring a chat template of its own, which is a program: it is run in a sandbox, and nothing bounds its time. With
    `request_priority` it may say that it goes before others that wait, those of other tenants among them."""

    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    request_chat_template: bool = False
    request_priority: bool = False


class SessionArgs(StrictModel):
    """Sessions end `idle_timeout_s` after their last turn, unless opened with a timeout of their own, which may be
    `max_timeout_s`."""

    idle_timeout_s: Seconds = 3600.0
    max_timeout_s: Annotated[Seconds, Field(validate_default=True)] = 7 * 24 * 3600.0
    sweep_interval_s: Interval = 1.0
    unnamed: UnnamedSessionArgs = UnnamedSessionArgs()

    @field_validator("unnamed")
    @classmethod
    def _kept_as_long_as_sessions_may_be(
        cls, unnamed: UnnamedSessionArgs, info: ValidationInfo
    ) -> UnnamedSessionArgs:
        longest_s = info.data.get("max_timeout_s", unnamed.idle_timeout_s)
        if unnamed.durable and unnamed.idle_timeout_s > longest_s:
            raise ValueError(
                f"idle_timeout_s: with durable, no more than max_timeout_s, which is {longest_s:g}"
            )
        return unnamed

    @field_validator("max_timeout_s")
    @classmethod
    def _no_shorter_than_the_default(cls, timeout_s: float, info: ValidationInfo) -> float:
        if timeout_s < info.data.get("idle_timeout_s", 0.0):
            raise ValueError(f"{timeout_s:g} is less than idle_timeout_s, which every session may have")
        return timeout_s


class TenantArgs(StrictModel):
    """What each tenant may have: open sessions and the tokens of their histories in the cluster, and at each replica
    turns in flight and tokens that wait to be computed. None: no limit of its own."""

    max_sessions: PositiveInt | None = None
    max_history_tokens: PositiveInt | None = None
    max_turns_in_flight: PositiveInt | None = None
    max_queued_tokens: PositiveInt | None = None


class RebalancingArgs(StrictModel):
    """When sessions move to a less busy replica, see controllers.settings.RebalancingSettings. `min_gap` in turns."""

    enabled: bool = True
    min_gap: Annotated[float, Field(ge=2)] = REBALANCING.min_gap
    tokens_per_s: Annotated[float, Field(gt=0)] = REBALANCING.tokens_per_s

    @field_validator("min_gap")
    @classmethod
    def _of_rebalancing(cls, min_gap: float, info: ValidationInfo) -> float:
        if min_gap != REBALANCING.min_gap and not info.data.get("enabled", True):
            raise ValueError("is for sessions that leave a busy replica, and enabled is false")
        return min_gap

    def settings(self) -> RebalancingSettings | None:
        return RebalancingSettings(self.min_gap, self.tokens_per_s) if self.enabled else None


class ControllerArgs(StrictModel):
    """The ownership ledger and the durable session log: `state_dir`/sessions.sqlite3, or in place of it Redis at
    `redis_url`, under keys that begin with `name`.

    `full_sync` flushes the disk at every commit: it survives a loss of power, and costs milliseconds. `encrypted` keeps
    what was said under a key from the environment. A replica unheard of for `replica_timeout_s` is dead. A finished
    turn waits `commit_patience_s` for a log that is away. With `shards`, so many controllers each have a part of the
    sessions, a log of their own, and their part of the limits.
    """

    name: NotEmpty = "kedge-controller"
    state_dir: NotEmpty = ".kedge"
    full_sync: bool = False
    redis_url: Annotated[str, Field(pattern=r"^(redis|rediss|unix|redis\+sentinel)://.")] | None = None
    redis_wait_replicas: Annotated[int, Field(ge=0)] = 0
    redis_wait_ms: Annotated[int, Field(ge=1, le=MOST_WAIT_MS)] = WAIT_MS
    encrypted: bool = False
    heartbeat_interval_s: Interval = 1.0
    replica_timeout_s: Annotated[Seconds, Field(validate_default=True)] = 10.0
    commit_patience_s: Seconds = 60.0
    max_sessions: PositiveInt = 100_000
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS)] = 1

    @field_validator("redis_url")
    @classmethod
    def _holds_no_secret(cls, redis_url: str | None, info: ValidationInfo) -> str | None:
        if redis_url is None:
            return None
        parts = urlsplit(redis_url)
        if parts.password is not None or "password" in parse_qs(parts.query):
            raise ValueError(
                f"Ray would log the password; it belongs in the environment variable {REDIS_PASSWORD}"
            )
        if info.data.get("full_sync"):
            raise ValueError("full_sync is for the log in state_dir; Redis has its own appendfsync")
        check_redis_url(redis_url)
        return redis_url

    @field_validator("redis_wait_replicas")
    @classmethod
    def _of_a_redis(cls, wait_replicas: int, info: ValidationInfo) -> int:
        if wait_replicas and info.data.get("redis_url", "") is None:
            raise ValueError("is for a log in Redis, and there is no redis_url")
        return wait_replicas

    @field_validator("redis_wait_ms")
    @classmethod
    def _for_replicas(cls, wait_ms: int, info: ValidationInfo) -> int:
        if wait_ms != WAIT_MS and info.data.get("redis_wait_replicas") == 0:
            raise ValueError("is how long redis_wait_replicas may take, and there are none to wait for")
        return wait_ms

    @field_validator("replica_timeout_s")
    @classmethod
    def _longer_than_heartbeats(cls, timeout_s: float, info: ValidationInfo) -> float:
        heartbeat_s = info.data.get("heartbeat_interval_s")
        if heartbeat_s is not None and timeout_s < HEARTBEATS_PER_TIMEOUT * heartbeat_s:
            raise ValueError(
                f"{timeout_s:g} is less than {HEARTBEATS_PER_TIMEOUT} × heartbeat_interval_s, {heartbeat_s:g}"
            )
        return timeout_s

    def actor_names(self) -> list[str]:
        """The names of the controller's actors."""
        return [shard_name(self.name, shard) for shard in range(self.shards)]

    def log_settings(self) -> LogSettings:
        """Where the session log is."""
        if self.redis_url is not None:
            return RedisLogSettings(
                self.redis_url,
                self.name,
                self.redis_wait_replicas,
                self.redis_wait_ms,
                self.encrypted,
                self.shards,
            )
        path = str(state_path(self.state_dir, STATE_DIR) / "sessions.sqlite3")
        return SqliteLogSettings(path, self.full_sync, self.encrypted, self.shards)


class DebugArgs(StrictModel):
    """For tests and demonstrations. With `faults` operators may plant faults, see serving/debug: refused where anybody
    but this machine may call."""

    faults: bool = False


class MetricsArgs(StrictModel):
    """`cluster_name` is the label `cluster` of every metric: clusters that share a Prometheus need names of their own.
    With `ray_llm_names` Ray's metrics have this cluster's figures also under the names that vLLM or SGLang have there,
    which Ray's own boards for LLMs read. `audit_interval_s`: so often each replica walks over all of its pages by
    itself (None: only when asked). With `tenant_names` the tenants that have the most KV are named on a page that needs
    no key."""

    cluster_name: NotEmpty = "kedge"
    ray_llm_names: Literal["none", "vllm", "sglang"] = "none"
    audit_interval_s: Interval | None = 60.0
    tenant_names: bool = False


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
    """Validates the args of every application in a `serve run` config file, and that none has another's sessions or
    port, or Ray Serve's."""
    file = read_file(path)
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
