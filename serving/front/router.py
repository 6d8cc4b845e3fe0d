"""Hard-pin request router: a call that names a replica goes to that replica or fails, never to a stranger.

The pin travels as the handle's `session_id` option and holds the replica's unique id. Calls without a pin go to the
less loaded of two; one that is pinned to ALL_REPLICAS is answered here with their names. Ownership lives in the cluster
controller, so that any number of routers agree.

Serve unlists a replica before it stops it, and such a replica still answers until its turns have ended. So calls that
name it are delivered until it has died; no other call goes there.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serving.wire.routing_errors import ALL_REPLICAS, KnownReplicas, Loss, Members, ReplicaGone


class PinnedRequestRouter(RequestRouter):  # type: ignore[misc]
    """Delivers by pin. Never raises and never returns an empty list: both would hang Serve's routing loop."""

    def initialize_state(self, unlisted_s: float) -> None:
        """Called by Serve, once. A replica that has not died `unlisted_s` after it was unlisted is forgotten."""
        self._unlisted_s = unlisted_s
        self._unlisted: dict[Any, RunningReplica] = {}
        self._ever_listed: set[str] = set()

    @property
    def max_num_routing_tasks(self) -> int:
        """One task per waiting call, so that calls pinned to a busy replica delay nobody else."""
        return max(1, int(self.num_pending_requests))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Keeps those that are listed no more beside those that are."""
        listed = {replica.replica_id for replica in replicas}
        known: dict[Any, RunningReplica] = self.curr_replicas
        dropped = [replica for name, replica in known.items() if name not in listed]
        news = [replica for replica in dropped if replica.replica_id not in self._unlisted]
        self._unlisted = {replica.replica_id: replica for replica in dropped}
        self._ever_listed.update(replica.replica_id.unique_id for replica in replicas)
        super().update_replicas([*replicas, *dropped])
        for replica in news:
            self._event_loop.call_later(self._unlisted_s, self._forget, replica)
        if news:
            # Serve unlists those that died, too: who does not answer this is dropped.
            self._event_loop.create_task(self._probe_queue_lens(news, 0))

    def _forget(self, replica: Any) -> None:
        kept = self._unlisted.get(replica.replica_id)
        if kept is not None and kept is replica:
            self.on_replica_actor_died(replica.replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._unlisted.pop(replica_id, None)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        listed = [replica for replica in candidate_replicas if replica.replica_id not in self._unlisted]
        if pending_request is None:
            return [listed or candidate_replicas]
        # Without this the loop calls again at once when the chosen replica does not answer.
        pending_request.routing_context.should_backoff = True
        pin = pending_request.metadata.session_id
        if not pin:
            # Where all of them go, those that go are better than nobody.
            free = listed or candidate_replicas
            return [random.sample(free, min(2, len(free)))]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == pin:
                return [[replica]]
        if not pending_request.future.done():
            pending_request.future.set_exception(self._answer(pin, listed))
            self._remove_pending_request_from_indices(pending_request)
        return [candidate_replicas]

    def _answer(self, pin: str, listed: list[RunningReplica]) -> Exception:
        """To a call that is not delivered."""
        if pin == ALL_REPLICAS:
            unlisted = tuple(name.unique_id for name in self._unlisted)
            return KnownReplicas(Members(tuple(replica.replica_id.unique_id for replica in listed), unlisted))
        return ReplicaGone(pin, Loss.DIED if pin in self._ever_listed else Loss.UNKNOWN)

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
