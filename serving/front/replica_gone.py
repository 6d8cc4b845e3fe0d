"""What a front end has seen of a replica that it cannot reach, or that answers too late."""

from __future__ import annotations

from enum import Enum

from serving.wire.errors import unavailable
from serving.wire.turns import ServiceError


class Loss(Enum):
    """UNKNOWN: the controller lists no such replica. UNREACHABLE: the connection broke, fell silent or could
    not be opened. DIED: its process has ended."""

    UNKNOWN = "unknown"
    UNREACHABLE = "unreachable"
    DIED = "died"


class ReplicaGone(Exception):
    """The replica was not reached, or is no longer reached. `had_call`: it may have begun what it was asked; if not,
    the connection was never open while the call waited."""

    def __init__(self, replica_id: str, loss: Loss = Loss.UNREACHABLE, *, had_call: bool = True) -> None:
        super().__init__(replica_id, loss)
        self.replica_id = replica_id
        self.loss = loss
        self.had_call = had_call


class ReplicaLate(ServiceError):
    """The replica gives signs of life, but has not answered a call in time: it may wait for the session log or for the
    controller. It may have done what it was asked, or may still do it."""

    def __init__(self) -> None:
        super().__init__(
            unavailable("the replica has not answered in time; it may still do what it was asked")
        )
