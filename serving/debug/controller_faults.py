"""Planted faults of the session log, as the cluster controller sees them. They run in the controller's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from controllers.errors import ControllerError, StoreError
from controllers.records import TurnRecord
from serving.debug.kinds import FaultKind


class FaultyStore:
    """The session log with commits that are slow or fail until `until_s`. Other calls, and later ones, go to the log.

    `clock` returns monotonic seconds; `wait` blocks the controller, as a slow disk does.
    """

    def __init__(
        self,
        store: Any,
        kind: FaultKind,
        until_s: float,
        delay_s: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self._kind = kind
        self._until_s = until_s
        self._delay_s = delay_s
        self._clock = clock
        self._wait = wait

    def append_turns(self, records: Sequence[TurnRecord]) -> Sequence[ControllerError | None]:
        """See SessionStore."""
        if self._clock() < self._until_s:
            if self._kind is FaultKind.FAIL_COMMITS:
                raise StoreError("planted by debug.faults: the log takes no turns")
            self._wait(self._delay_s)
        outcomes: Sequence[ControllerError | None] = self.store.append_turns(records)
        return outcomes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def plant_in_controller(controller: Any, kind: str | None, for_s: float, delay_s: float) -> None:
    """Plants a fault in a ClusterController, in place of an existing one; None for `kind` removes it."""
    commits = controller._cluster.commits
    store = commits._store.store if isinstance(commits._store, FaultyStore) else commits._store
    if kind is not None:
        store = FaultyStore(store, FaultKind(kind), time.monotonic() + for_s, delay_s)
    commits._store = store
