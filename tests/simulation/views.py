"""What the parties know about each other once the cluster is calm, compared with the facts."""

from __future__ import annotations

from collections.abc import Iterator

from controllers.cluster import Cluster as Ledger
from controllers.replicas import ReplicaState
from serving.front.ingress import Ingress
from tests.simulation.expectations import Expectations
from tests.simulation.network import Party
from tests.simulation.parties import Cluster
from tests.simulation.truth import Truth

LOOK_S = 0.2


class DetectorWatch:
    """Checks repeatedly whether the controller has the right view of each replica."""

    def __init__(self, cluster: Cluster, expectations: Expectations, truth: Truth) -> None:
        self._cluster = cluster
        self._expectations = expectations
        self._truth = truth
        self._reported: set[str] = set()

    def look(self) -> None:
        """Checks now, and from then on every LOOK_S."""
        controller = self._cluster.serve.controller
        if controller is not None:
            directory = controller.actor._cluster._replicas
            for party in self._cluster.serve.replicas:
                if directory.state(party.name) is ReplicaState.GONE and not self._expectations.may_be_gone(
                    party
                ):
                    self._wrong(party, "taken for gone, with no cause")
            for party in self._cluster.live_replicas:
                state = directory.state(party.name)
                goes = state in (ReplicaState.DRAINING, ReplicaState.GONE)
                if not goes and self._expectations.must_be_known_to_go(party):
                    self._wrong(party, f"{state.value}, though it is to go")
        self._cluster.world.after(LOOK_S, self.look)

    def _wrong(self, party: Party, what: str) -> None:
        if party.name not in self._reported:
            self._reported.add(party.name)
            self._truth.wrong(f"{party.name} is {what}")


def wrong_views(cluster: Cluster) -> list[str]:
    """Wrong views while no fault is active and no replica is about to go, except one that no other can replace."""
    controller = cluster.serve.controller
    if controller is None:
        return ["no controller"]
    known = controller.actor._cluster
    states = {party: known._replicas.state(party.name) for party in cluster.serve.replicas}
    calm = {ReplicaState.LIVE}
    if [party.asked_to_go for party in states] == [True]:
        calm.add(ReplicaState.DRAINING)
    wrong = [f"{party.name} is {state.value}" for party, state in states.items() if state not in calm]
    epochs = {entry.session_id: (entry.epoch, entry.replica_id) for entry in known.sessions()}
    for party in cluster.live_ingresses:
        wrong += _of_ingress(party, epochs)
    wrong += _of_reports(known, cluster.live_replicas)
    return wrong


def _of_reports(known: Ledger, replicas: list[Party]) -> Iterator[str]:
    """Compares what the ledger has heard of the sessions that replicas hold with what they hold. Replicas report only
    changes. What a replica that is gone reported stays until its sessions move."""
    live = {party.name for party in replicas}
    held = {
        (party.name, status.session_id): (status.epoch, status.in_turn)
        for party in replicas
        for status in party.actor._parts.sessions.snapshot()
    }
    told = {
        (entry.replica_id, entry.session_id): (entry.epoch, entry.in_turn)
        for entry in known.sessions()
        if entry.reported_s is not None and entry.replica_id in live
    }
    for place in sorted(held.items() ^ told.items()):
        yield f"held: {held.get(place[0])}, told: {told.get(place[0])}, of {place[0]}"


def takeovers(cluster: Cluster) -> int:
    """The number of turns that went on at another replica in mid-stream, as counted by the ingresses that live."""
    return sum(int(party.actor._metrics._takeovers._value.get()) for party in cluster.live_ingresses)


def _of_ingress(party: Party, epochs: dict[str, tuple[int, str]]) -> Iterator[str]:
    """An ingress may remember a former owner of a session, but never one that the session never had."""
    ingress: Ingress = party.actor
    for session_id, owner in ingress._dispatcher._owners._cache._owners.items():
        epoch, replica_id = epochs.get(session_id, (owner.epoch, owner.replica_id))
        if owner.epoch > epoch or (owner.epoch == epoch and owner.replica_id != replica_id):
            yield f"{party.name}: {session_id} at {owner}, it is at {replica_id} with epoch {epoch}"
