"""The replicas that there are, as the controller, which alone decides it, has told this front end last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from controllers.errors import ControllerError
from controllers.records import ReplicaStatus
from serving.wire.controller_calls import ControllerCalls

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
HOLDERS_LOAD = 8
"""Turns that a replica may have more than another, and still get what it has the beginning of: computing that again
takes longer than to wait for so many."""


@dataclass(slots=True)
class _Known:
    status: ReplicaStatus
    begun: int = 0
    """Calls that were sent there since it last reported its load."""


class Membership:
    """Used on the front end's event loop only. `look` is to be called every LOOK_INTERVAL_S. `on_gone` is called for
    each replica that is listed no more.

    While the controller is away what it said last counts.
    """

    def __init__(self, controller: ControllerCalls, on_gone: Callable[[str], None], random: Random) -> None:
        self._controller = controller
        self._random = random
        self._on_gone = on_gone
        self._known: dict[str, _Known] = {}

    @property
    def present(self) -> tuple[str, ...]:
        """Those that may answer, those that are about to stop among them."""
        return tuple(self._known)

    def status(self, replica_id: str) -> ReplicaStatus | None:
        known = self._known.get(replica_id)
        return None if known is None else known.status

    async def look(self) -> None:
        """Asks the controller. Raises ControllerError."""
        statuses = {status.replica_id: status for status in await self._controller.replicas()}
        gone = [name for name in self._known if name not in statuses]
        known = self._known
        self._known = {
            name: _Known(status, known[name].begun if _is_same_report(known.get(name), status) else 0)
            for name, status in statuses.items()
        }
        for name in gone:
            logger.info("replica %s is gone", name)
            self._on_gone(name)

    async def find(self, replica_id: str) -> ReplicaStatus | None:
        """Of a replica that may have come since the last look, too."""
        if replica_id not in self._known:
            try:
                await self.look()
            except ControllerError as error:
                logger.warning("the controller does not tell who is there: %s", error)
        return self.status(replica_id)

    def pick(self, holder: str | None = None) -> str | None:
        """The less loaded of two, for a call that any may take: none that is to go, while there is another. None if
        there is nobody. `holder` has something that the call needs, and gets it unless it is much more loaded."""
        staying = [name for name, known in self._known.items() if not known.status.draining]
        names = staying or list(self._known)
        if not names:
            return None
        chosen = min(self._random.sample(names, min(2, len(names))), key=self._load)
        if holder in names and self._load(holder) <= self._load(chosen) + HOLDERS_LOAD:
            chosen = holder
        self._known[chosen].begun += 1
        return chosen

    def _load(self, replica_id: str) -> int:
        known = self._known[replica_id]
        return known.status.running + known.status.waiting + known.begun


def _is_same_report(known: _Known | None, status: ReplicaStatus) -> bool:
    return known is not None and known.status.seen_s == status.seen_s
