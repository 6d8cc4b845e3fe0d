"""The policy asks for enough replicas to keep turns and KV within the targets. It asks for fewer only with a margin."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext, AutoscalingPolicy

from serving.replica.autoscaling_policy import (
    DOWNSCALE_MARGIN,
    LoadPolicy,
    ReplicaLoad,
    needed_replicas,
)

TARGET = ReplicaLoad(turns_in_flight=10, kv_utilization=0.8)
IDLE = ReplicaLoad(0, 0)
DEPLOYMENT = DeploymentID("LLMReplica", "kedge")


def turns(*counts: float) -> list[ReplicaLoad | None]:
    return [ReplicaLoad(count, 0) for count in counts]


def kv(*shares: float) -> list[ReplicaLoad | None]:
    return [ReplicaLoad(0, share) for share in shares]


@pytest.mark.parametrize(
    ("loads", "current", "needed"),
    [
        (turns(10), 1, 1),
        (turns(10.5), 1, 2),
        (turns(35), 1, 4),
        (turns(30, 0), 2, 3),
        (turns(14, 2), 2, 2),  # uneven load is a matter of rebalancing
        (kv(0.8), 1, 1),
        (kv(0.9), 1, 2),
        (kv(3.0, 0.1), 2, 4),
        ([ReplicaLoad(11, 0.1)], 1, 2),  # the greater of the two pressures counts
        ([ReplicaLoad(1, 1.7)], 1, 3),
    ],
)
def test_more_replicas_as_turns_or_kv_need_them(
    loads: list[ReplicaLoad | None], current: int, needed: int
) -> None:
    assert needed_replicas(loads, TARGET, current) == needed


@pytest.mark.parametrize(
    ("loads", "current", "needed"),
    [
        (turns(4, 4), 2, 1),
        (turns(4.5, 4.5), 2, 2),  # one replica would have 9 of 10, more than the margin allows
        (kv(0.3, 0.3), 2, 1),
        (kv(0.4, 0.3), 2, 2),
        ([ReplicaLoad(1, 0.6), ReplicaLoad(1, 0.6), ReplicaLoad(1, 0)], 3, 2),  # KV needs two replicas
        (turns(0, 0, 0), 3, 1),  # at least one replica stays
    ],
)
def test_fewer_only_with_a_margin(loads: list[ReplicaLoad | None], current: int, needed: int) -> None:
    assert needed_replicas(loads, TARGET, current) == needed


def test_no_load_makes_the_number_go_to_and_fro() -> None:
    """For each load there is a number of replicas that does not change again, whatever the number was before."""
    for load in range(60):
        for before in range(1, 8):
            after = needed_replicas(turns(load), TARGET, before)
            assert needed_replicas(turns(load), TARGET, after) == after
            assert load <= after * TARGET.turns_in_flight
            if after < before:
                assert load <= after * TARGET.turns_in_flight * DOWNSCALE_MARGIN


def test_none_goes_while_a_load_is_not_known() -> None:
    assert needed_replicas([IDLE, None], TARGET, 2) == 2
    assert needed_replicas([None, None], TARGET, 3) == 3
    assert needed_replicas([], TARGET, 3) == 3, "all have died: Serve starts them again"
    assert needed_replicas([ReplicaLoad(35, 0), None], TARGET, 2) == 4, "but more may come"


def test_replicas_that_are_still_starting_count_as_there() -> None:
    assert needed_replicas(turns(25), TARGET, 3) == 3


def context(reports: Sequence[dict[str, float]], *, target: int, requests: float = 0.0) -> AutoscalingContext:
    """What Serve gives a policy. `requests` is Serve's own count, which includes streams to ingresses."""
    replicas = [ReplicaID(str(number), DEPLOYMENT) for number in range(len(reports))]
    metrics: dict[str, dict[ReplicaID, float]] = {}
    for replica, report in zip(replicas, reports, strict=True):
        for name, value in report.items():
            metrics.setdefault(name, {})[replica] = value
    return AutoscalingContext(
        deployment_id=DEPLOYMENT,
        deployment_name=DEPLOYMENT.name,
        app_name=DEPLOYMENT.app_name,
        current_num_replicas=len(reports),
        target_num_replicas=target,
        running_replicas=replicas,
        total_num_requests=requests,
        total_queued_requests=0.0,
        aggregated_metrics=metrics,
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=None,
    )


def test_serve_s_own_count_of_requests_is_not_looked_at() -> None:
    """Serve also counts a stream from a replica to an ingress as a request."""
    policy = LoadPolicy(target_turns_in_flight=2, target_kv_utilization=0.8)
    idle = [IDLE.stats(), IDLE.stats()]
    assert policy(context(idle, target=2, requests=100)) == (1, {})
    assert policy(context([ReplicaLoad(7, 0.1).stats()], target=1)) == (4, {})


def test_a_replica_that_has_not_reported_is_not_taken_for_an_idle_one() -> None:
    policy = LoadPolicy(target_turns_in_flight=2, target_kv_utilization=0.8)
    assert policy(context([IDLE.stats(), {}], target=2)) == (2, {})
    assert policy(context([IDLE.stats(), {"turns_in_flight": 0}], target=2)) == (2, {})


def test_the_policy_runs_where_the_project_is_not() -> None:
    """Ray Serve's controller may have been started without the project on its path. It gets the policy pickled with its
    module."""
    policy = AutoscalingPolicy(
        policy_function="serving.replica.autoscaling_policy:LoadPolicy",
        policy_kwargs={"target_turns_in_flight": 2.0, "target_kv_utilization": 0.5},
    )
    pickled = policy.get_serialized_policy_def()
    assert pickled is not None
    alone = f"""
import sys
class NotHere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("serving", "engine", "cache", "controllers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NotHere())
import pickle, types
policy = pickle.loads({pickled!r})(**{policy.policy_kwargs!r})
stats = {{"turns_in_flight": {{"a": 1.0}}, "kv_utilization": {{"a": 1.4}}}}
print(policy(types.SimpleNamespace(aggregated_metrics=stats, running_replicas=["a"], target_num_replicas=1)))
"""
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "(3, {})", done.stderr
    assert math.ceil(1.4 / 0.5) == 3
    assert cloudpickle.loads(pickled).__name__ == "LoadPolicy"
