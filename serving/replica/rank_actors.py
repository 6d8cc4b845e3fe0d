"""A replica over several GPUs: rank 0's engine runs in the replica's own actor, each other rank in an actor beside it.

Ray places one process in each bundle of the replica's placement group, and ends them all with the replica. At every
step the ranks talk over their own sockets (engine/parallel/).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from engine.api import DeltaSink, Engine
from engine.parallel.protocol import RanksNotStarted, Ticket
from engine.settings import EngineSettings
from serving.garbage import keep, unsearched
from serving.settings.config import AppArgs

if TYPE_CHECKING:
    from engine.parallel.team import RankProcess

PLACEMENT_STRATEGY = "STRICT_PACK"
"""All ranks on one node: they exchange results twice per layer."""


def placement_options(args: AppArgs) -> dict[str, Any]:
    """Options of the replicas' deployment: one bundle per rank. The replica itself runs in the first."""
    if args.execution.tensor_parallel == 1:
        return {}
    demand = {"CPU": args.replicas.num_cpus, "GPU": args.replicas.num_gpus}
    bundle = {name: amount for name, amount in demand.items() if amount}
    return {
        "placement_group_bundles": [dict(bundle) for _ in range(args.execution.tensor_parallel)],
        "placement_group_strategy": PLACEMENT_STRATEGY,
    }


class ParallelEngineFactory:
    """Builds a replica's engine in the replica's actor. `num_cpus` and `num_gpus` are per rank."""

    def __init__(self, num_cpus: float, num_gpus: float) -> None:
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus

    def __call__(self, settings: EngineSettings, sink: DeltaSink) -> Engine:
        with unsearched():
            from engine.build import build_parallel_engine  # imports torch, which takes seconds
        keep()

        def start(tickets: Sequence[Ticket]) -> Sequence[RankProcess]:
            return start_ranks(tickets, settings, self._num_cpus, self._num_gpus)

        return build_parallel_engine(settings, sink, start, get_node_ip_address())


class RankActor:
    """The process of a rank. Its `run` returns when the rank stops serving."""

    def run(self, ticket: Ticket, settings: EngineSettings) -> None:
        from engine.build_runner import make_runner
        from engine.parallel.follow import run_rank

        run_rank(ticket, settings, make_runner)


class ActorRank:
    """Implements RankProcess with an actor; `run` is its running call."""

    def __init__(self, actor: ActorHandle, run: Any) -> None:
        self._actor = actor
        self._run = run

    def ended(self) -> str | None:
        if not ray.wait([self._run], timeout=0)[0]:
            return None
        try:
            ray.get(self._run)
        except Exception as error:
            return str(error)
        return "it ended by itself"

    def kill(self) -> None:
        with suppress(Exception):  # whatever Ray raises for an actor that has already ended
            ray.kill(self._actor)


def start_ranks(
    tickets: Sequence[Ticket], settings: EngineSettings, num_cpus: float, num_gpus: float
) -> list[RankProcess]:
    """Starts the rank of each ticket in its bundle of the replica's placement group. Call it in the replica's actor.
    Raises RanksNotStarted if there is no placement group."""
    group = get_current_placement_group()
    if group is None:
        raise RanksNotStarted("the replica has no placement group for its ranks")
    ranks: list[RankProcess] = []
    for ticket in tickets:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=ticket.rank)
        actor_class = ray.remote(RankActor).options(
            num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0, scheduling_strategy=strategy
        )
        actor = actor_class.remote()
        ranks.append(ActorRank(actor, actor.run.remote(ticket, settings)))
    return ranks
