"""What a cluster may think of a replica, and what it must know, by what was wrong with whom."""

from __future__ import annotations

from controllers.replicas import BY_PREFERENCE, ReplicaState
from tests.simulation.network import Party
from tests.simulation.parties import Cluster
from tests.simulation.troubles import Troubles

UNHEARD = frozenset({"freeze replica", "cut replica from controller", "storm"})
"""What keeps a replica's heartbeats from the controller."""
UNREACHABLE = frozenset({"cut ingress from replica", "freeze ingress", "storm"})
"""What makes ingresses report it, though it is heard."""
UNTOLD = frozenset(
    {
        "freeze controller",
        "kill controller",
        "log frozen",
        "cut controller from log",
        "storm",
    }
)
"""What keeps the controller from hearing a replica that says it is to go: it stands still while it waits for its
log."""
UNHEARD_FOR_S = 1.0
"""Added to the time between two heartbeats and to the messages' own, it may be more than a suspect replica is given."""
UNREACHABLE_SHARE = 0.6
"""Of the time after which a replica that is heard counts as gone, since ingresses cannot reach it."""
REMEMBERED_S = 30.0
TOLD_S = 1.5
"""By then the controller knows that Serve is about to stop a replica."""


class Expectations:
    """Asked while the run goes on: everything is of this moment."""

    def __init__(self, cluster: Cluster, troubles: Troubles) -> None:
        self._cluster = cluster
        self._troubles = troubles

    def replica(self, name: str) -> Party | None:
        return next((party for party in self._cluster.replicas if party.name == name), None)

    def may_be_gone(self, replica: Party) -> bool:
        """Whether there is a cause to take it for gone."""
        if replica.dead or replica.asked_to_go:
            return True
        if self._troubles.lasted_s(UNHEARD, replica.name, REMEMBERED_S) > UNHEARD_FOR_S:
            return True
        enough_s = UNREACHABLE_SHARE * self._cluster.args.controller.replica_timeout_s
        return self._troubles.lasted_s(UNREACHABLE, replica.name, REMEMBERED_S) > enough_s

    def has_others(self, replica: Party) -> bool:
        """Whether the controller knows of another that could have its sessions."""
        controller = self._cluster.serve.controller
        if controller is None:
            return False
        directory = controller.actor._cluster._replicas
        staying = (state for state in BY_PREFERENCE if state is not ReplicaState.DRAINING)
        return any(status.replica_id != replica.name for status in directory.in_state(*staying))

    def must_be_known_to_go(self, replica: Party) -> bool:
        """Whether nothing keeps the controller from knowing that it is about to go."""
        controller = self._cluster.serve.controller
        if replica.dead or replica.goes_since_s is None or controller is None:
            return False
        if self._cluster.world.now_s <= max(replica.goes_since_s, controller.ready_s) + TOLD_S:
            return False
        since_s = replica.goes_since_s - TOLD_S
        # A controller that was started anew has forgotten a drain until the replica's next heartbeat.
        if self._troubles.lasted_s(UNHEARD, replica.name, self._cluster.world.now_s - since_s) > 0:
            return False
        return not self._troubles.any_since(UNTOLD, since_s)
