"""Hard-pin request router: a call that names a replica goes to that replica or fails, never to a stranger.

The pin travels as the handle's `session_id` option and holds the replica's unique id. Calls without a pin go to the
less loaded of two; one that is pinned to ALL_REPLICAS is answered here with their names. Stateless: ownership lives
in the cluster controller, so that any number of routers agree.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from serving.wire.routing_errors import ALL_REPLICAS, ReplicaGone, RunningReplicas


class PinnedRequestRouter(RequestRouter):  # type: ignore[misc]
    """Delivers by pin. Never raises and never returns an empty list: both would hang Serve's routing loop."""

    @property
    def max_num_routing_tasks(self) -> int:
        """One task per waiting call, so that calls pinned to a busy replica delay nobody else."""
        return max(1, int(self.num_pending_requests))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        # Without this the loop calls again at once when the chosen replica does not answer.
        pending_request.routing_context.should_backoff = True
        pin = pending_request.metadata.session_id
        if not pin:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == pin:
                return [[replica]]
        if not pending_request.future.done():
            names = tuple(replica.replica_id.unique_id for replica in candidate_replicas)
            pending_request.future.set_exception(
                RunningReplicas(names) if pin == ALL_REPLICAS else ReplicaGone(pin)
            )
            self._remove_pending_request_from_indices(pending_request)
        return [candidate_replicas]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> Any:
        """Gives the call an id of its own before Serve indexes it.

        Serve finds a waiting call by the id of the HTTP request it stems from; two concurrent calls of one HTTP
        request would be taken for each other, and one of them would wait forever.
        """
        if not is_retry:
            own_id = f"{pending_request.metadata.internal_request_id}-{random.getrandbits(48):012x}"
            pending_request.metadata = replace(pending_request.metadata, internal_request_id=own_id)
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
