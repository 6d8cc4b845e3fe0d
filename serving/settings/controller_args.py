"""Settings of the controller and of the session log."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from pydantic import Field, ValidationInfo, field_validator

from controllers.session_log.redis_url import check_redis_url
from controllers.settings import REDIS_PASSWORD, LogSettings, RedisLogSettings, SqliteLogSettings
from controllers.shards import shard_name
from serving.settings.settings_paths import state_path
from serving.settings.strict_settings import Interval, NotEmpty, PositiveInt, Seconds, StrictModel, matching

WAIT_MS = 300
MOST_WAIT_MS = 900
"""Less than the second that the controller waits for any answer of Redis."""
MOST_SHARDS = 64
STATE_DIR = "controller.state_dir"

HEARTBEATS_PER_TIMEOUT = 3
"""One that is late, or lost, does not make a replica dead."""


RedisUrl = Annotated[
    str,
    matching(
        r"(redis|rediss|unix|redis\+sentinel)://.+", "redis://…, rediss://…, unix:///… or redis+sentinel://…"
    ),
]


class ControllerArgs(StrictModel):
    """The controller, which knows who owns which session, and [the session log](operations/session-log.md)."""

    name: NotEmpty = Field(
        default="kedge-controller",
        description="The name of the controller's actor. Two applications on one cluster need two.",
    )
    state_dir: NotEmpty = Field(
        default=".kedge",
        description="""The directory of the session log. A relative path starts at `$KEDGE_HOME`, if
        that is set; else at the repository; or, where Kedge is installed as a package or Ray uploaded
        it, at the home directory.""",
    )
    full_sync: bool = Field(
        default=False,
        description="""Flush the disk before a commit counts: commits survive a loss of power. It costs
        one flush for each group of turns that are committed together. Not for a log in Redis.""",
    )
    redis_url: RedisUrl | None = Field(
        default=None,
        description="""The session log is [in Redis](operations/redis.md) instead:
        `redis://host:port/db`, `rediss://…`, `unix:///path` or, behind Sentinel,
        `redis+sentinel://host:port,host:port/service/db`.""",
    )
    redis_wait_replicas: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="A change of the log counts as made once this many replicas of Redis have it; 0 waits for none.",
    )
    redis_wait_ms: Annotated[int, Field(ge=1, le=MOST_WAIT_MS)] = Field(
        default=WAIT_MS,
        description="""How long the controller waits for the replicas of `redis_wait_replicas`. It does
        nothing else meanwhile.""",
    )
    encrypted: bool = Field(
        default=False,
        description="""Histories and answers are [encrypted in the log](operations/session-log.md#encryption),
        under keys from `KEDGE_LOG_KEYS`.""",
    )
    heartbeat_interval_s: Interval = Field(
        default=1.0,
        description="How often a replica reports its load and what has changed of its sessions.",
    )
    replica_timeout_s: Annotated[Seconds, Field(validate_default=True)] = Field(
        default=10.0,
        description="""A replica that is silent for this long counts as gone; if a front end cannot
        reach it either, once two of its heartbeats are missing. At least three `heartbeat_interval_s`.""",
    )
    commit_patience_s: Seconds = Field(
        default=60.0,
        description="How long a finished turn waits for a session log, or a controller, that does not answer.",
    )
    max_sessions: PositiveInt = Field(
        default=100_000,
        description="""Open sessions; beyond this a new one is refused with 429. Each takes 0.7 KB of
        the controller's memory, and 10 to 14 µs of its next start.""",
    )
    shards: Annotated[int, Field(ge=1, le=MOST_SHARDS)] = Field(
        default=1,
        description="""So many controllers share the sessions, for fleets with several million of them,
        or over ten thousand turns a second. Each has a log of its own, and its part of `max_sessions`
        and of the limits of tenants, rounded up.""",
    )

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
        if not cls.is_default(info.field_name, wait_ms) and info.data.get("redis_wait_replicas") == 0:
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
