"""The replicas that exist, as the controller last told this front end. The controller alone decides."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from controllers.errors import ControllerError, NoAnswer
from controllers.records import ReplicaStatus
from serving.front.known_places import NOWHERE, Affinity
from serving.wire.controller_calls import ControllerCalls

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.5
HOLDERS_LOAD = 8
"""A call goes to the replica that has its beginning while that replica has at most this many turns more than the least
loaded one. Computing the beginning again takes longer than waiting for this many turns."""
NEWCOMERS_LOAD = 2
"""The same, for a conversation of which no replica has anything yet: for the replica that its home chooses."""


@dataclass(slots=True)
class _Known:
    status: ReplicaStatus
    others: int = 0
    """Turns of other front ends at the replica, estimated: those in its last report, less the most that this front end
    had there since the report before."""
    most_own: int = 0
    """The most turns that this front end has had there at once since the last report."""


class Membership:
    """The replicas that this front end knows. Call `look` every LOOK_INTERVAL_S. `on_gone` is called for each replica
    that is no longer listed. Used on the front end's event loop only.

    While the controller does not answer, its last answer counts.
    """

    def __init__(self, controller: ControllerCalls, on_gone: Callable[[str], None], random: Random) -> None:
        self._controller = controller
        self._random = random
        self._on_gone = on_gone
        self._known: dict[str, _Known] = {}
        self._own: Counter[str] = Counter()
        """How many turns this front end has at each replica."""

    @property
    def present(self) -> tuple[str, ...]:
        """The replicas that may answer, including those about to stop."""
        return tuple(self._known)

    def status(self, replica_id: str) -> ReplicaStatus | None:
        known = self._known.get(replica_id)
        return None if known is None else known.status

    async def look(self) -> None:
        """Asks the controller for the replicas. Raises ControllerError. A controller that has just started may not have
        heard yet of replicas that are known here: until it has, none is taken for gone."""
        try:
            listed = await self._controller.replicas(bool(self._known))
        except NoAnswer:
            await self.learn()  # which fails, too, unless the controller has just started
            return
        statuses = {status.replica_id: status for status in listed}
        gone = [name for name in self._known if name not in statuses]
        self._known = {name: self._reported(status) for name, status in statuses.items()}
        for name in gone:
            logger.info("replica %s is gone", name)
            self._on_gone(name)

    async def find(self, replica_id: str) -> ReplicaStatus | None:
        """The status of a replica. If it is unknown it may be new: the controller is asked again first. No replica is
        taken for gone by that."""
        if replica_id not in self._known:
            try:
                await self.learn()
            except ControllerError as error:
                logger.warning("the controller does not tell who is there: %s", error)
        return self.status(replica_id)

    async def learn(self) -> None:
        """Asks the controller for the replicas, and takes none for gone that it does not list: it may be called
        beside `look`, and the answers of both may come in another order. Raises ControllerError."""
        listed = await self._controller.replicas()
        self._known |= {status.replica_id: self._reported(status) for status in listed}

    def pick(self, affinity: Affinity = NOWHERE, refused_by: Collection[str] = ()) -> str | None:
        """A replica for a call that any replica may take; None if there is none. A draining replica is chosen only if
        all drain, and one that has refused the call only if all others have, too.

        The replica that `affinity` prefers, unless it is much more loaded; else the less loaded of two random ones.
        """
        staying = self._staying()
        names = [name for name in staying if name not in refused_by] or staying
        if not names:
            return None
        chosen = self._preferred(affinity, names)
        if chosen is None:
            chosen = min(self._random.sample(names, min(2, len(names))), key=self._load)
        return chosen

    def preferred(self, affinity: Affinity) -> str | None:
        """The replica that `affinity` prefers, unless it is much more loaded; None if it prefers none. Rendezvous
        hashing with bounded loads (Thaler and Ravishankar 1998; Mirrokni et al. 2018): front ends that know the same
        replicas rank them alike. A replica that comes or goes moves only its own conversations."""
        return self._preferred(affinity, self._staying())

    def has_other(self, refused_by: Collection[str]) -> bool:
        """Whether there is a replica that has not refused the call, and does not drain."""
        return any(name not in refused_by for name in self._staying())

    def _preferred(self, affinity: Affinity, names: list[str]) -> str | None:
        if not names or (affinity.holder is None and affinity.home is None):
            return None
        least = min(map(self._load, names))
        if affinity.holder in names and self._load(affinity.holder) <= least + HOLDERS_LOAD:
            return affinity.holder
        if affinity.home is None:
            return None
        room = HOLDERS_LOAD if affinity.goes_on else NEWCOMERS_LOAD
        fit = [name for name in names if self._load(name) <= least + room]
        return max(fit, key=lambda name: _weight(affinity.home or b"", name))

    @contextmanager
    def turn_at(self, replica_id: str) -> Iterator[None]:
        """Counts a turn of this front end at the replica while the context lasts."""
        self._own[replica_id] += 1
        if (known := self._known.get(replica_id)) is not None:
            known.most_own = max(known.most_own, self._own[replica_id])
        try:
            yield
        finally:
            self._own[replica_id] -= 1
            if not self._own[replica_id]:
                del self._own[replica_id]

    def _staying(self) -> list[str]:
        """The replicas that do not drain; if all drain, all."""
        staying = [name for name, known in self._known.items() if not known.status.draining]
        return staying or list(self._known)

    def _reported(self, status: ReplicaStatus) -> _Known:
        before = self._known.get(status.replica_id)
        if before is not None and before.status.seen_s == status.seen_s:
            return _Known(status, before.others, before.most_own)
        own = self._own[status.replica_id]
        most_own = own if before is None else before.most_own
        return _Known(status, max(0, status.running + status.waiting - most_own), own)

    def _load(self, replica_id: str) -> int:
        """Turns in flight at the replica. Reports are up to a second old: this front end's own turns are counted, those
        of others estimated."""
        return self._known[replica_id].others + self._own[replica_id]


def _weight(home: bytes, replica_id: str) -> bytes:
    return blake2b(replica_id.encode(), key=home, digest_size=8).digest()
