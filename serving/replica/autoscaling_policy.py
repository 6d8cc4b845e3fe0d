"""Autoscaling by turns in flight and KV: the load that replicas report to Ray Serve, and the policy it runs on it.

Ray Serve's controller runs the policy from a copy of this file, in a process that may not have the project installed.
So this file imports nothing from the project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

TURNS_IN_FLIGHT = "turns_in_flight"
KV_UTILIZATION = "kv_utilization"

DOWNSCALE_MARGIN = 0.8
"""The policy scales down only if fewer replicas can carry the load at this share of the targets. Otherwise a replica
that was just removed would soon be needed again."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's load: its running and waiting turns, and its KV utilization. The same type holds a replica's targets
    for both."""

    turns_in_flight: float
    kv_utilization: float

    def stats(self) -> dict[str, float]:
        """The load as `record_autoscaling_stats` reports it to Ray Serve."""
        return {TURNS_IN_FLIGHT: self.turns_in_flight, KV_UTILIZATION: self.kv_utilization}


def needed_replicas(loads: Sequence[ReplicaLoad | None], target: ReplicaLoad, current: int) -> int:
    """How many replicas there should be instead of `current`. `loads`: those of the running replicas (None: not known).

    It is the number that keeps both the sum of turns and the sum of KV within the target. Rebalancing decides which
    replica has which sessions. The number is below `current` only if the load fits with a margin and the load of every
    running replica is known.
    """
    known = [load for load in loads if load is not None]
    pressure = max(
        sum(load.turns_in_flight for load in known) / target.turns_in_flight,
        sum(load.kv_utilization for load in known) / target.kv_utilization,
    )
    needed = _whole(pressure)
    if needed >= current or not known or len(known) < len(loads):
        return max(needed, current)
    return min(current, max(1, _whole(pressure / DOWNSCALE_MARGIN)))


class LoadPolicy:
    """An autoscaling policy for Ray Serve, with targets per replica. Ray Serve itself averages the replicas' reports,
    keeps the number within its bounds and applies the delays."""

    def __init__(self, target_turns_in_flight: float, target_kv_utilization: float) -> None:
        self._target = ReplicaLoad(target_turns_in_flight, target_kv_utilization)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas, and an empty state: the policy keeps none."""
        reported = context.aggregated_metrics or {}
        turns, kv = reported.get(TURNS_IN_FLIGHT, {}), reported.get(KV_UTILIZATION, {})
        loads = [
            ReplicaLoad(turns[replica], kv[replica]) if replica in turns and replica in kv else None
            for replica in context.running_replicas
        ]
        return needed_replicas(loads, self._target, context.target_num_replicas), {}


def _whole(pressure: float) -> int:
    return math.ceil(pressure - ROUNDING)
