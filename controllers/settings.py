"""Settings of the cluster controller. Validated at the edge (serving/settings/config.py), frozen here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from controllers.wire_record import wire_record

REDIS_PASSWORD = "KEDGE_REDIS_PASSWORD"
"""The environment variable of the controller's process with the password of Redis. It is no setting because Ray writes
settings to its logs."""

REDIS_SENTINEL_PASSWORD = "KEDGE_REDIS_SENTINEL_PASSWORD"
"""The same for Sentinels, which have their own password or none."""

LOG_KEYS = "KEDGE_LOG_KEYS"
"""The same for the keys that encrypt the session log."""


@wire_record
@dataclass(frozen=True, slots=True)
class RebalancingSettings:
    """When sessions move to even out load, see controllers/rebalancing.py.

    `min_gap`: how many more turns in flight than another a replica must have on average. It is at least 2, else a move
    might make the other replica the busier one. `tokens_per_s` is how fast a replica computes a history, which is the
    cost of a move. Each of `shards` controllers moves sessions to close the same gap.
    """

    min_gap: float = 3.0
    tokens_per_s: float = 5000.0
    shards: int = 1


@wire_record
@dataclass(frozen=True, slots=True)
class SqliteLogSettings:
    """The session log's file on the head node; with several `shards`, that of one `shard`, beside the others. With
    `full_sync` every commit survives a loss of power, not only of the process, at the price of a disk flush per commit.
    `encrypted`: see controllers/session_log/log_cipher.py."""

    path: str
    full_sync: bool = False
    encrypted: bool = False
    shards: int = 1
    shard: int = 0

    @property
    def file(self) -> str:
        """The path of the shard's own file."""
        if self.shards == 1:
            return self.path
        path = PurePath(self.path)
        return str(path.with_stem(f"{path.stem}-{self.shard}-of-{self.shards}"))

    def __str__(self) -> str:
        return self.file


@wire_record
@dataclass(frozen=True, slots=True)
class RedisLogSettings:
    """A session log in Redis, under keys that contain `name`; with several `shards`, that of one `shard`. The password
    is not a setting.

    A change counts as made once `wait_replicas` replicas of Redis have it, which must be within `wait_ms`.
    """

    url: str
    name: str
    wait_replicas: int = 0
    wait_ms: int = 300
    encrypted: bool = False
    shards: int = 1
    shard: int = 0

    @property
    def prefix(self) -> str:
        """What the names of the shard's keys begin with. With the braces all shards are in one slot of a Redis
        Cluster."""
        return self.common_prefix + ("" if self.shards == 1 else f"{self.shard}-of-{self.shards}:")

    @property
    def common_prefix(self) -> str:
        """What the names of all shards' keys begin with."""
        return f"kedge:{{{self.name}}}:"

    def __str__(self) -> str:
        part = "" if self.shards == 1 else f", shard {self.shard} of {self.shards},"
        return f"{self.name}{part} in Redis at {self.url}"


LogSettings = SqliteLogSettings | RedisLogSettings


@wire_record
@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of the cluster controller.

    Replicas report every `heartbeat_interval_s`. A replica that is silent for `replica_timeout_s` is gone.
    `session_timeout_s` is the idle timeout of sessions that were opened without one. `placement_tokens` is the KV that
    placement expects a new session to take before the next heartbeat. Without `rebalancing`, sessions stay where they
    are while their owner lives.

    A client that opens a session may ask for an idle timeout up to `max_timeout_s`. A tenant may have `tenant_sessions`
    sessions open. It can open no more if its histories would then exceed `tenant_history_tokens` in total. None: the
    tenant has no limit of its own.
    """

    replica_timeout_s: float = 10.0
    session_timeout_s: float = 3600.0
    max_sessions: int = 100_000
    placement_tokens: int = 1024
    rebalancing: RebalancingSettings | None = RebalancingSettings()
    heartbeat_interval_s: float = 1.0
    max_timeout_s: float = 7 * 24 * 3600.0
    tenant_sessions: int | None = None
    tenant_history_tokens: int | None = None


@wire_record
@dataclass(frozen=True, slots=True)
class Deployment:
    """What a deployment of the application announces to the controller. Each `serve deploy` has a new
    `deployment_id`."""

    deployment_id: str
    settings: ClusterSettings
    log: LogSettings
