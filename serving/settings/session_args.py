"""Settings of sessions: how long they live, what a tenant may have, and when they move."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from controllers.settings import RebalancingSettings
from serving.settings.strict_settings import Interval, PositiveInt, Seconds, StrictModel, matching

REBALANCING = RebalancingSettings()


CookieName = Annotated[
    str, matching(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}", "a cookie's name of at most 64 characters")
]


class AffinityArgs(StrictModel):
    """What, beside `prompt_cache_key`, says which conversations should be at one replica."""

    user: bool = Field(
        default=False,
        description="""Conversations of the same user (`user`, in Messages `metadata.user_id`) go to
        one replica as long as its load allows it, as those with the same `prompt_cache_key` do. Not for
        programs that send one name for all their traffic.""",
    )
    cookie: CookieName | None = Field(
        default=None,
        description="""The same for requests whose cookie of this name has the same value. Take one
        that has another value in each browser, and keeps it during a conversation. Cookies of load
        balancers may have neither: HAProxy's name a server, and with `indirect` they do not get here;
        those of an Application Load Balancer are encrypted with keys that change. With several front
        ends, a conversation whose value changes is looked for at another replica.""",
    )


class UnnamedSessionArgs(StrictModel):
    """Conversations whose clients name no session, and send the whole conversation each time."""

    enabled: bool = Field(
        default=True,
        description="""Conversations whose clients name no session, and send the whole conversation each time,
        are recognized, and go where their KV is.""",
    )
    idle_timeout_s: Seconds = Field(
        default=600.0,
        description="""How long such a conversation is kept after its last turn. Without `durable` it
        is not in the log, and gives way earlier if others need the room.""",
    )
    durable: bool = Field(
        default=False,
        description="""Such conversations are sessions of the log from their second turn on. Front ends
        that have just started, and replicas that take over, find them. Each turn costs a commit, and
        the log has what was said, except Responses with `store: false`. Each counts as a session for
        limits, also one whose only turn failed; beyond the limits it runs as without this setting.
        Requests that all begin with the same examples share one session: use it for conversations, not
        for such programs.""",
    )
    affinity: AffinityArgs = AffinityArgs()

    @field_validator("idle_timeout_s")
    @classmethod
    def _of_what_is_recognized(cls, timeout_s: float, info: ValidationInfo) -> float:
        if info.data.get("enabled") is False and not cls.is_default(info.field_name, timeout_s):
            raise ValueError("is of conversations that are recognized, and enabled is false")
        return timeout_s

    @field_validator("durable")
    @classmethod
    def _only_if_recognized(cls, durable: bool, info: ValidationInfo) -> bool:
        if durable and not info.data.get("enabled", True):
            raise ValueError("needs enabled: true, since only conversations that are recognized are kept")
        return durable


class SessionArgs(StrictModel):
    """How long sessions live."""

    idle_timeout_s: Seconds = Field(
        default=3600.0,
        description="A session ends this long after its last turn, unless it was opened with a timeout of its own.",
    )
    max_timeout_s: Annotated[Seconds, Field(validate_default=True)] = Field(
        default=7 * 24 * 3600.0,
        description="The longest idle timeout that a session may be opened with.",
    )
    sweep_interval_s: Interval = Field(default=1.0, description="How often expired sessions are looked for.")
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
    """What each [tenant](operations/keys.md#tenants) may have. Unless set, there is no limit."""

    max_sessions: PositiveInt | None = Field(default=None, description="Open sessions of each tenant.")
    max_history_tokens: PositiveInt | None = Field(
        default=None,
        description="""Tokens in the histories of a tenant's sessions. A tenant that has as many opens
        no more sessions. The log has 4 bytes for each.""",
    )
    max_turns_in_flight: PositiveInt | None = Field(
        default=None,
        description="Turns in flight of a tenant at each replica.",
    )
    max_queued_tokens: PositiveInt | None = Field(
        default=None,
        description="""New tokens of a tenant's turns that wait to be computed at each replica. A turn
        that is alone in its tenant's queue is taken, however long.""",
    )


class RebalancingArgs(StrictModel):
    """What is done about [uneven load](operations/replicas.md#uneven-load)."""

    enabled: bool = Field(default=True, description="Sessions move from a busy replica to a less busy one.")
    min_gap: Annotated[float, Field(ge=2)] = Field(
        default=REBALANCING.min_gap,
        description="""How many more turns in flight, on average, a replica must have than another
        before any session leaves it.""",
    )
    tokens_per_s: Annotated[float, Field(gt=0)] = Field(
        default=REBALANCING.tokens_per_s,
        description="""How many tokens of a history a replica computes in a second. This sets the cost
        of a move, and how fast a replica that drains hands over sessions in use.""",
    )

    @field_validator("min_gap")
    @classmethod
    def _of_rebalancing(cls, min_gap: float, info: ValidationInfo) -> float:
        if not cls.is_default(info.field_name, min_gap) and not info.data.get("enabled", True):
            raise ValueError("is for sessions that leave a busy replica, and enabled is false")
        return min_gap

    def settings(self) -> RebalancingSettings | None:
        return RebalancingSettings(self.min_gap, self.tokens_per_s) if self.enabled else None
