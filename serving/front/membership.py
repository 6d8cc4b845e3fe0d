"""The replicas that there are, as the controller, which alone decides it, has told this front end last."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from controllers.errors import ControllerError
from controllers.records import ReplicaStatus
from serving.front.conversations import NOWHERE, Affinity
from serving.wire.controller_calls import ControllerCalls

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
HOLDERS_LOAD = 8
"""Turns that a replica may have more than another, and still get what it has the beginning of: computing that again
takes longer than to wait for so many."""
NEWCOMERS_LOAD = 2
"""The same, for a conversation of which no replica has anything yet."""


@dataclass(slots=True)
class _Known:
    status: ReplicaStatus
    others: int = 0
    """Turns in its last report that are not this front end's, as far as that can be told: those beside the most that
    this one had there since the report before."""
    most_own: int = 0
    """The most that this front end has had there since the last report."""


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
        self._own: Counter[str] = Counter()
        """Turns of this front end by replica."""

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
        self._known = {name: self._reported(status) for name, status in statuses.items()}
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

    def pick(self, affinity: Affinity = NOWHERE) -> str | None:
        """A replica for a call that any may take: none that is to go, while there is another. None if there is nobody.

        The less loaded of two; but one that has something which the call needs, unless it is much more loaded.
        """
        staying = [name for name, known in self._known.items() if not known.status.draining]
        names = staying or list(self._known)
        if not names:
            return None
        chosen = self._preferred(names, affinity)
        if chosen is None:
            chosen = min(self._random.sample(names, min(2, len(names))), key=self._load)
        return chosen

    @contextmanager
    def turn_at(self, replica_id: str) -> Iterator[None]:
        """While it lasts a turn of this front end is at the replica."""
        self._own[replica_id] += 1
        if (known := self._known.get(replica_id)) is not None:
            known.most_own = max(known.most_own, self._own[replica_id])
        try:
            yield
        finally:
            self._own[replica_id] -= 1
            if not self._own[replica_id]:
                del self._own[replica_id]

    def _preferred(self, names: list[str], affinity: Affinity) -> str | None:
        """Rendezvous hashing with bounded loads (Thaler and Ravishankar 1998; Mirrokni et al. 2018): whoever knows the
        same replicas has the same order of them, and who comes or goes moves no other conversation."""
        least = min(map(self._load, names))
        if affinity.holder in names and self._load(affinity.holder) <= least + HOLDERS_LOAD:
            return affinity.holder
        if affinity.home is None:
            return None
        room = HOLDERS_LOAD if affinity.goes_on else NEWCOMERS_LOAD
        fit = [name for name in names if self._load(name) <= least + room]
        return max(fit, key=lambda name: _weight(affinity.home or b"", name))

    def _reported(self, status: ReplicaStatus) -> _Known:
        before = self._known.get(status.replica_id)
        if before is not None and before.status.seen_s == status.seen_s:
            return _Known(status, before.others, before.most_own)
        own = self._own[status.replica_id]
        most_own = own if before is None else before.most_own
        return _Known(status, max(0, status.running + status.waiting - most_own), own)

    def _load(self, replica_id: str) -> int:
        """Turns under way there. Reports are a second old: those of this front end are counted, others' guessed."""
        return self._known[replica_id].others + self._own[replica_id]


def _weight(home: bytes, replica_id: str) -> bytes:
    return blake2b(replica_id.encode(), key=home, digest_size=8).digest()
