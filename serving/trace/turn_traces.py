"""What a turn reports to its trace, at a front end and at a replica. UNTRACED is for turns without a trace.

Implementations neither raise nor wait. Without tracing a turn makes no object for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

from serving.wire.turns import TurnCall, TurnEvent


class FrontTrace(Protocol):
    """One turn at the front end, from its call to its end. A context manager; an error that leaves it is recorded."""

    def __enter__(self) -> FrontTrace: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

    def placing(self) -> AbstractContextManager[None]:
        """A context around the search for a replica. Spans that begin in it are children of this one."""

    def at(self, replica_id: str, epoch: int | None) -> AbstractContextManager[None]:
        """A context around one attempt at the turn, until it ends there. Another task may leave it."""

    def carried(self, call: TurnCall) -> TurnCall:
        """The call of this attempt, as the replica must receive it."""

    def ended_there(self, reason: str) -> None:
        """The attempt failed; `reason` is the code of an error."""

    def failed_over(self, reason: str) -> None:
        """Therefore another attempt follows."""

    def taken_over(self, replica_id: str) -> None:
        """The turn goes on at `replica_id`, in mid-stream."""

    def tell(self, event: TurnEvent) -> None:
        """The client is sent this event."""


class ReplicaTrace(Protocol):
    """One turn at a replica, from its call to its last event; a context manager like FrontTrace. The stages are begin,
    queue, prefill, decode, commit."""

    def __enter__(self) -> ReplicaTrace: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

    @property
    def on_admitted(self) -> Callable[[], None] | None:
        """For the engine to call on its thread once the turn has left the queue and runs."""

    def submitted(self) -> None:
        """The engine has accepted the turn."""

    def computed_first(self) -> None:
        """The first token has come."""

    def computed(self) -> None:
        """The engine has sent its last delta."""

    def committing(self) -> AbstractContextManager[None]:
        """A context around the turn's commit to the log. Spans that begin in it are children of this one."""

    def ended(self, event: TurnEvent) -> None:
        """The turn's last event."""


class FrontTraces(Protocol):
    def turn(self, call: TurnCall) -> FrontTrace:
        """The trace of a turn that begins."""


class ReplicaTraces(Protocol):
    def turn(self, call: TurnCall, epoch: int | None) -> ReplicaTrace:
        """The trace of a turn that has arrived."""


class Untraced:
    """Accepts every call and keeps nothing."""

    _NOTHING: AbstractContextManager[None] = nullcontext()

    on_admitted: Callable[[], None] | None = None

    def turn(self, _call: TurnCall, _epoch: int | None = None) -> Untraced:
        return self

    def __enter__(self) -> Untraced:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

    def placing(self) -> AbstractContextManager[None]:
        return self._NOTHING

    def at(self, _replica_id: str, _epoch: int | None) -> AbstractContextManager[None]:
        return self._NOTHING

    def carried(self, call: TurnCall) -> TurnCall:
        return call

    def ended_there(self, _reason: str) -> None: ...

    def failed_over(self, _reason: str) -> None: ...

    def taken_over(self, _replica_id: str) -> None: ...

    def tell(self, _event: TurnEvent) -> None: ...

    def submitted(self) -> None: ...

    def computed_first(self) -> None: ...

    def computed(self) -> None: ...

    def committing(self) -> AbstractContextManager[None]:
        return self._NOTHING

    def ended(self, _event: TurnEvent) -> None: ...


UNTRACED = Untraced()
