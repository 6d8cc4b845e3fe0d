"""What a front end has seen of a replica that it cannot reach."""

from __future__ import annotations

from enum import Enum


class Loss(Enum):
    """UNKNOWN: the controller lists no such replica. UNREACHABLE: a call took too long, or the connection broke, fell
    silent or could not be opened. DIED: its process has ended."""

    UNKNOWN = "unknown"
    UNREACHABLE = "unreachable"
    DIED = "died"


class ReplicaGone(Exception):
    """The replica was not reached, or is no longer reached. Whether anything was delivered is not known here."""

    def __init__(self, replica_id: str, loss: Loss = Loss.UNREACHABLE) -> None:
        super().__init__(replica_id, loss)
        self.replica_id = replica_id
        self.loss = loss
