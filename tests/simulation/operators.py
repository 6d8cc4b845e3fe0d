"""An operator who runs `kedge drain`. The drain empties a replica, and Serve then replaces it."""

from __future__ import annotations

import asyncio

from ray.exceptions import RayActorError, RayTaskError

from serving.wire.turns import ErrorInfo
from tests.simulation.calls import Call
from tests.simulation.network import Party
from tests.simulation.parties import Cluster
from tests.simulation.truth import Truth

REFUSALS = frozenset({"no_replica", "replica_not_found", "replica_unavailable", "controller_unavailable"})
LONGEST_ANSWER_S = 60.0


class Operator:
    """A party that never fails. `drained` are the replicas whose drain was accepted. Each of them ends, unless it is
    the last replica and has sessions."""

    def __init__(self, cluster: Cluster, truth: Truth) -> None:
        self.drained: list[Party] = []
        self._party = Party("operator", cluster.world)
        self._cluster = cluster
        self._truth = truth

    def drain(self, replica: Party) -> None:
        """Asks any ingress to drain the replica. Does nothing if there is no ingress."""
        if not self._cluster.serve.ingresses:
            return
        replica.asked_to_go = True
        call = Call(self._cluster.network, self._party, "web.drain", (replica.name,))
        call.send(self._cluster.random.choice(self._cluster.serve.ingresses))
        self._party.loop.create_task(self._hear(call, replica))

    async def _hear(self, call: Call, replica: Party) -> None:
        try:
            async with asyncio.timeout(LONGEST_ANSWER_S):
                refusal: ErrorInfo | None = await call
        except RayActorError:
            return
        except (RayTaskError, TimeoutError) as error:
            self._truth.wrong(f"drain of {replica.name}: {error!r}")
            return
        if refusal is None:
            self.drained.append(replica)
            replica.goes_since_s = self._cluster.world.now_s
        elif refusal.code not in REFUSALS:
            self._truth.wrong(f"drain of {replica.name}: {refusal}")
