"""Settings of the engine replicas as Ray Serve runs them: how many there are, and what each takes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from serving.settings.strict_settings import PositiveInt, Seconds, StrictModel

MOST_SECONDS_BETWEEN_REPORTS = 10
"""Ray Serve's default: load is to be averaged over more than one report, as it warns."""

SHORTEST_STEP_TIMEOUT_S = 1.0
"""A healthy step may take most of a second."""


class AutoscalingArgs(StrictModel):
    """[The number of replicas follows their load](operations/replicas.md#autoscaling)."""

    min_replicas: PositiveInt = Field(default=1, description="The smallest number of replicas.")
    max_replicas: PositiveInt = Field(description="The largest number of replicas.")
    target_turns_in_flight: Annotated[float, Field(gt=0)] = Field(
        default=16.0,
        description="How many turns, running and waiting, one replica should have.",
    )
    target_kv_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8,
        description="The share of a replica's KV pool that its turns should need.",
    )
    look_back_s: Annotated[float, Field(gt=MOST_SECONDS_BETWEEN_REPORTS)] = Field(
        default=30.0,
        description="The time over which load is averaged.",
    )
    upscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        default=30.0,
        description="How long more replicas must be needed before new ones start.",
    )
    downscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        default=600.0,
        description="How long fewer replicas must be enough before some stop.",
    )

    @field_validator("max_replicas")
    @classmethod
    def _not_below_the_fewest(cls, max_replicas: int, info: ValidationInfo) -> int:
        min_replicas = info.data.get("min_replicas")
        if min_replicas is not None and max_replicas < min_replicas:
            raise ValueError(f"{max_replicas} is less than min_replicas, {min_replicas}")
        return max_replicas


class ReplicaArgs(StrictModel):
    """Engine replicas as Ray Serve runs them. CPUs and GPUs are those of each replica, or of each of its ranks with
    `execution.tensor_parallel`."""

    count: PositiveInt = Field(
        default=2,
        description="""How many replicas there are. [How to change it](operations/changes.md)
        while they serve.""",
    )
    autoscaling: AutoscalingArgs | None = Field(
        default=None,
        description="""In place of `count`: the number of replicas
        [follows their load](operations/replicas.md#autoscaling).""",
    )
    num_cpus: Annotated[float, Field(ge=0)] = Field(default=0.5, description="CPUs that Ray reserves.")
    num_gpus: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="GPUs that Ray reserves: a part of one, or a whole number.",
    )
    graceful_shutdown_timeout_s: Seconds = Field(
        default=20.0,
        description="""How long turns in flight may take when a replica stops. In the first half of
        this time, sessions in use are handed over one at a time.""",
    )
    step_timeout_s: Annotated[float, Field(ge=SHORTEST_STEP_TIMEOUT_S)] = Field(
        default=300.0,
        description="""A replica whose engine has been in one step for this long counts as hung: its
        turns go on elsewhere at once, its sessions when they are next used, and the replica is
        replaced. A slow step that ends before that does not count against the replica.""",
    )
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = Field(
        default=None,
        description="""How many new replicas [a rolling update](operations/changes.md) starts
        before it stops old ones, in percent of those there are. Unless set, 100, and with `num_gpus` 0.""",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_number(cls, values: Any) -> Any:
        if isinstance(values, dict) and "count" in values and values.get("autoscaling") is not None:
            raise ValueError("count and autoscaling exclude each other: leave one of them out")
        return values

    @field_validator("num_gpus")
    @classmethod
    def _whole_above_one(cls, num_gpus: float) -> float:
        if num_gpus > 1 and not num_gpus.is_integer():
            raise ValueError(f"{num_gpus:g} is no whole number: Ray shares out parts of one GPU only")
        return num_gpus

    @property
    def surge_percent(self) -> int:
        """New replicas beside the old ones in a rolling update. Unless it is set, all, but none where that takes GPUs:
        those that are there are in use."""
        if self.max_surge_percent is not None:
            return self.max_surge_percent
        return 0 if self.num_gpus else 100
