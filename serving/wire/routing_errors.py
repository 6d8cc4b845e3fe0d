"""How the router answers calls that it does not deliver.

In a module of its own: Ray Serve pickles the router's module by value, and an exception class defined there would
not be the class that the caller catches.
"""

from __future__ import annotations

ALL_REPLICAS = "*"
"""A pin that asks who runs."""


class ReplicaGone(Exception):
    """The pinned replica is not, or no longer, among the running ones; the call was not delivered."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.replica_id = replica_id


class RunningReplicas(Exception):
    """No failure: the answer to a call that is pinned to ALL_REPLICAS."""

    def __init__(self, replica_ids: tuple[str, ...]) -> None:
        super().__init__(replica_ids)
        self.replica_ids = replica_ids
