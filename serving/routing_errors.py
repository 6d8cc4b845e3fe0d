"""Why a pinned call could not be delivered.

In a module of its own: Ray Serve pickles the router's module by value, and an exception class defined there would
not be the class that the caller catches.
"""

from __future__ import annotations


class ReplicaGone(Exception):
    """The pinned replica is not, or no longer, among the running ones; the call was not delivered."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(replica_id)
        self.replica_id = replica_id
