"""How many replicas the turns in flight and their KV take: what replicas tell Ray Serve, and what it makes of that.

Ray Serve's controller runs the policy from a copy of this file, in a process that need not have the project: nothing of
the project is imported here.
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
"""Fewer replicas must have the load with this part of the targets: so what was taken away is not soon missed."""

ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Turns that run and wait, and the share of the KV pool that they take and lack; also what a replica may have of
    each, as a target."""

    turns_in_flight: float
    kv_utilization: float

    def stats(self) -> dict[str, float]:
        """As `record_autoscaling_stats` tells Ray Serve."""
        return {TURNS_IN_FLIGHT: self.turns_in_flight, KV_UTILIZATION: self.kv_utilization}


def needed_replicas(loads: Sequence[ReplicaLoad | None], target: ReplicaLoad, current: int) -> int:
    """How many replicas there should be in place of `current`, by the loads of those that run (None: not known yet).

    As many as have the sum of turns and the sum of KV within the target; which of them has what is for rebalancing.
    Fewer than `current` only if they have it with a margin, and if the load of all that run is known.
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
    """An autoscaling policy of Ray Serve, which averages the replicas' reports, keeps to the bounds and waits for the
    delays. The targets are those of a replica."""

    def __init__(self, target_turns_in_flight: float, target_kv_utilization: float) -> None:
        self._target = ReplicaLoad(target_turns_in_flight, target_kv_utilization)

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state to be kept."""
        reported = context.aggregated_metrics or {}
        turns, kv = reported.get(TURNS_IN_FLIGHT, {}), reported.get(KV_UTILIZATION, {})
        loads = [
            ReplicaLoad(turns[replica], kv[replica]) if replica in turns and replica in kv else None
            for replica in context.running_replicas
        ]
        return needed_replicas(loads, self._target, context.target_num_replicas), {}


def _whole(pressure: float) -> int:
    return math.ceil(pressure - ROUNDING)
