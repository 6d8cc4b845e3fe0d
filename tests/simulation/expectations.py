"""What a cluster may think of a replica, and what it must know, given the faults so far."""

from __future__ import annotations

from controllers.replicas import BY_PREFERENCE, ReplicaState
from tests.simulation.network import Party
from tests.simulation.parties import Cluster
from tests.simulation.troubles import Troubles

UNHEARD = frozenset({"freeze replica", "cut replica from controller", "storm"})
"""Faults that keep a replica's heartbeats from the controller."""
UNREACHABLE = frozenset({"cut ingress from replica", "freeze ingress", "storm"})
"""Faults that make ingresses report a replica as unreachable although the controller hears it."""
UNTOLD = frozenset(
    {
        "freeze controller",
        "kill controller",
        "log frozen",
        "cut controller from log",
        "storm",
    }
)
"""Faults that keep the controller from hearing that a replica is about to go. While the controller waits for its log,
it does nothing else."""
UNHEARD_FOR_S = 1.0
"""Silence of this length may be too long. Added to the time between two heartbeats and the messages' delays it may
exceed what a suspect replica is given."""
UNREACHABLE_SHARE = 0.6
"""Share of the time after which a replica that ingresses cannot reach counts as gone, although it is heard."""
REMEMBERED_S = 30.0
TOLD_S = 1.5
"""Within this time the controller learns that Serve is about to stop a replica."""


class Expectations:
    """What may be expected at the present moment of the run."""

    def __init__(self, cluster: Cluster, troubles: Troubles) -> None:
        self._cluster = cluster
        self._troubles = troubles

    def replica(self, name: str) -> Party | None:
        return next((party for party in self._cluster.replicas if party.name == name), None)

    def may_be_gone(self, replica: Party) -> bool:
        """Whether there is a reason to take the replica for gone."""
        if replica.dead or replica.asked_to_go:
            return True
        if self._troubles.lasted_s(UNHEARD, replica.name, REMEMBERED_S) > UNHEARD_FOR_S:
            return True
        enough_s = UNREACHABLE_SHARE * self._cluster.args.controller.replica_timeout_s
        return self._troubles.lasted_s(UNREACHABLE, replica.name, REMEMBERED_S) > enough_s

    def has_others(self, replica: Party) -> bool:
        """Whether the controller knows another replica that could take its sessions."""
        controller = self._cluster.serve.controller
        if controller is None:
            return False
        directory = controller.actor._cluster._replicas
        staying = (state for state in BY_PREFERENCE if state is not ReplicaState.DRAINING)
        return any(status.replica_id != replica.name for status in directory.in_state(*staying))

    def must_be_known_to_go(self, replica: Party) -> bool:
        """Whether the controller must know that the replica is about to go, because nothing keeps it from knowing."""
        controller = self._cluster.serve.controller
        if replica.dead or replica.goes_since_s is None or controller is None:
            return False
        if self._cluster.world.now_s <= max(replica.goes_since_s, controller.ready_s) + TOLD_S:
            return False
        since_s = replica.goes_since_s - TOLD_S
        # A controller that was restarted does not know of a drain until the replica's next heartbeat.
        if self._troubles.lasted_s(UNHEARD, replica.name, self._cluster.world.now_s - since_s) > 0:
            return False
        return not self._troubles.any_since(UNTOLD, since_s)
