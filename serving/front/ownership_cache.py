"""Which replica owns which session, as an ingress remembers it. Only a hint: owners check the epoch, and the controller
decides."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Owner:
    """A session's owner, as last heard. `open_key`: see Assignment. The session was open at `opened_s` of the event
    loop's time, perhaps earlier (None: not known)."""

    replica_id: str
    epoch: int
    open_key: str | None = field(default=None, compare=False)
    opened_s: float | None = field(default=None, compare=False)


class OwnershipCache:
    """Owners by session key, for the `capacity` sessions used last. A wrong entry costs one extra round trip, but never
    causes a wrong answer."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[str, Owner] = OrderedDict()

    def get(self, key: str) -> Owner | None:
        owner = self._owners.get(key)
        if owner is not None:
            self._owners.move_to_end(key)
        return owner

    def put(self, key: str, owner: Owner) -> None:
        self._owners[key] = owner
        self._owners.move_to_end(key)
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def forget(self, key: str) -> None:
        self._owners.pop(key, None)

    def forget_replica(self, replica_id: str) -> None:
        """Drops every session of a replica that is lost."""
        for key in [key for key, owner in self._owners.items() if owner.replica_id == replica_id]:
            del self._owners[key]
