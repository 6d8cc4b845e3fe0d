"""What an ingress remembers of who owns which session. Only a hint: owners check the epoch, the controller decides."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Owner:
    """A session's owner as last heard. `open_key` as in Assignment."""

    replica_id: str
    epoch: int
    open_key: str | None = field(default=None, compare=False)


class OwnershipCache:
    """The `capacity` sessions used last. A wrong entry costs one extra round, never a wrong answer."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[tuple[str, str], Owner] = OrderedDict()

    def get(self, tenant: str, session_id: str) -> Owner | None:
        owner = self._owners.get((tenant, session_id))
        if owner is not None:
            self._owners.move_to_end((tenant, session_id))
        return owner

    def put(self, tenant: str, session_id: str, owner: Owner) -> None:
        self._owners[tenant, session_id] = owner
        self._owners.move_to_end((tenant, session_id))
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def forget(self, tenant: str, session_id: str) -> None:
        self._owners.pop((tenant, session_id), None)

    def forget_replica(self, replica_id: str) -> None:
        """Drops every session of a replica that is lost."""
        for key in [key for key, owner in self._owners.items() if owner.replica_id == replica_id]:
            del self._owners[key]
