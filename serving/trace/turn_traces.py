"""What a turn tells its trace: at a front end, and at a replica. UNTRACED is for turns that have none.

Who is told this neither raises nor waits. Without tracing a turn makes no object for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

from serving.wire.turns import TurnCall, TurnEvent


class FrontTrace(Protocol):
    """One turn at the front end, from its call to its end; a context, which is left with what went wrong."""

    def __enter__(self) -> FrontTrace: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

    def placing(self) -> AbstractContextManager[None]:
        """Around the search for a replica. What is called in it has the span as its parent."""

    def at(self, replica_id: str, epoch: int | None) -> AbstractContextManager[None]:
        """Around one attempt at the turn, to its end there. It may be left in another task."""

    def carried(self, call: TurnCall) -> TurnCall:
        """The call of this attempt as the replica is to get it."""

    def ended_there(self, reason: str) -> None:
        """The attempt came to nothing, by the code of an error."""

    def failed_over(self, reason: str) -> None:
        """So there will be another."""

    def taken_over(self, replica_id: str) -> None:
        """The turn goes on at that one, in mid-stream."""

    def tell(self, event: TurnEvent) -> None:
        """The client is told this."""


class ReplicaTrace(Protocol):
    """One turn at a replica, from its call to its last event; a context as FrontTrace is. It goes from stage to stage:
    begin, queue, prefill, decode, commit."""

    def __enter__(self) -> ReplicaTrace: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None, /
    ) -> None: ...

    @property
    def on_admitted(self) -> Callable[[], None] | None:
        """For the engine's thread: it runs, and waits in the queue no more."""

    def submitted(self) -> None:
        """The engine has it."""

    def computed_first(self) -> None:
        """Its first token is there."""

    def computed(self) -> None:
        """The engine has sent its last delta."""

    def committing(self) -> AbstractContextManager[None]:
        """Around its way into the log. What is called in it has the span as its parent."""

    def ended(self, event: TurnEvent) -> None:
        """Its last event."""


class FrontTraces(Protocol):
    def turn(self, call: TurnCall) -> FrontTrace:
        """Of a turn that begins."""


class ReplicaTraces(Protocol):
    def turn(self, call: TurnCall, epoch: int | None) -> ReplicaTrace:
        """Of a turn that has come here."""


class Untraced:
    """Is told everything, and keeps nothing."""

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
