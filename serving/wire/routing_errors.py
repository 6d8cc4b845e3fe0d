"""How the router answers calls it does not deliver, and what an ingress knows of a replica that it cannot reach."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

ALL_REPLICAS = "*"
"""A pin that asks who is there."""


class Loss(Enum):
    """What was seen of a replica that cannot be reached.

    UNKNOWN: this router has never listed it, and says nothing of it. UNREACHABLE: a call or a stream broke off, fell
    silent or took too long. DIED: its process has ended.
    """

    UNKNOWN = "unknown"
    UNREACHABLE = "unreachable"
    DIED = "died"


class ReplicaGone(Exception):
    """The replica was not reached, or not any more; whether anything was delivered is for the caller to know."""

    def __init__(self, replica_id: str, loss: Loss = Loss.UNREACHABLE) -> None:
        super().__init__(replica_id, loss)
        self.replica_id = replica_id
        self.loss = loss


@dataclass(frozen=True, slots=True)
class Members:
    """The replicas of a router by id: those that Serve lists, and those that it listed before and which have not
    died."""

    listed: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()

    @property
    def present(self) -> tuple[str, ...]:
        return self.listed + self.unlisted


class KnownReplicas(Exception):
    """No failure: the answer to a call that is pinned to ALL_REPLICAS."""

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.members = members
