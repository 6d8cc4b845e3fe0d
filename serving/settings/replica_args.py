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
    """The number of replicas follows their load, see serving/replica/autoscaling_policy.py. The targets are what one
    replica should have: turns that run and wait, and the share of its KV pool that these take and lack. Load is an
    average over the last `look_back_s`; one above or below the targets must last for the delays."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt
    target_turns_in_flight: Annotated[float, Field(gt=0)] = 16.0
    target_kv_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    look_back_s: Annotated[float, Field(gt=MOST_SECONDS_BETWEEN_REPORTS)] = 30.0
    upscale_delay_s: Annotated[float, Field(ge=0)] = 30.0
    downscale_delay_s: Annotated[float, Field(ge=0)] = 600.0

    @field_validator("max_replicas")
    @classmethod
    def _not_below_the_fewest(cls, max_replicas: int, info: ValidationInfo) -> int:
        min_replicas = info.data.get("min_replicas")
        if min_replicas is not None and max_replicas < min_replicas:
            raise ValueError(f"{max_replicas} is less than min_replicas, {min_replicas}")
        return max_replicas


class ReplicaArgs(StrictModel):
    """Engine replicas: `count` of them, unless there is `autoscaling`.

    With `execution.tensor_parallel` the CPUs and GPUs are those of each rank.
    """

    count: PositiveInt = 2
    autoscaling: AutoscalingArgs | None = None
    num_cpus: Annotated[float, Field(ge=0)] = 0.5
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    graceful_shutdown_timeout_s: Seconds = 20.0
    step_timeout_s: Annotated[float, Field(ge=SHORTEST_STEP_TIMEOUT_S)] = 300.0
    max_surge_percent: Annotated[int, Field(ge=0, le=100)] | None = None

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
