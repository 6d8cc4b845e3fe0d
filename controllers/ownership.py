"""OwnershipLedger: which replica owns which session, at which epoch. Pure logic, one owner.

Invariant: a session's epoch grows by one with every change of owner and never otherwise. (That a session opened under
the id of a closed one starts above it is the log's care.) So a former owner can always be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from controllers.errors import SessionExists, SessionNotFound, StaleEpoch
from controllers.records import LedgerEntry, SessionRecord, SessionStatus
from controllers.session_keys import named


@dataclass(slots=True)
class TenantUse:
    """What a tenant has in the ledger: open sessions, and the tokens of their histories."""

    sessions: int = 0
    tokens: int = 0


class OwnershipLedger:
    """Sessions and their owners. `clock` returns Unix time in seconds, `attended` the controller's attended time."""

    def __init__(
        self,
        clock: Callable[[], float],
        attended: Callable[[], float],
        entries: Iterable[LedgerEntry] = (),
    ) -> None:
        self._clock = clock
        self._attended = attended
        self._entries: dict[str, LedgerEntry] = {}
        self._by_replica: dict[str, set[str]] = {}
        self._by_tenant: dict[str, TenantUse] = {}
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._entries

    def open(self, record: SessionRecord) -> LedgerEntry:
        """Adds a session with its first owner. Raises SessionExists."""
        return self.add(LedgerEntry.of(record, self._clock()))

    def add(self, entry: LedgerEntry) -> LedgerEntry:
        """Adds a session as the log has it. Raises SessionExists."""
        if entry.session_id in self._entries:
            raise SessionExists(f"{named(entry.session_id)} is open already", "session_id")
        self._entries[entry.session_id] = entry
        self._by_replica.setdefault(entry.replica_id, set()).add(entry.session_id)
        use = self._by_tenant.setdefault(entry.tenant, TenantUse())
        use.sessions += 1
        use.tokens += entry.tokens
        return entry

    def get(self, session_id: str) -> LedgerEntry:
        """The session's entry. Raises SessionNotFound."""
        entry = self._entries.get(session_id)
        if entry is None:
            raise SessionNotFound(f"no {named(session_id)}", "session_id")
        return entry

    def fence(self, session_id: str, epoch: int, replica_id: str | None = None) -> LedgerEntry:
        """The session's entry, if `epoch` (and `replica_id`, if given) owns it.

        Raises SessionNotFound and StaleEpoch.
        """
        entry = self.get(session_id)
        if entry.epoch != epoch:
            raise StaleEpoch(f"{named(session_id)} is at epoch {entry.epoch}, not {epoch}")
        if replica_id is not None and entry.replica_id != replica_id:
            raise StaleEpoch(f"{named(session_id)} is owned by {entry.replica_id!r}, not {replica_id!r}")
        return entry

    def transfer(self, session_id: str, replica_id: str) -> LedgerEntry:
        """Gives the session to another replica at the next epoch. Raises SessionNotFound."""
        entry = self.get(session_id)
        self._by_replica[entry.replica_id].discard(session_id)
        self._by_replica.setdefault(replica_id, set()).add(session_id)
        return self._put(
            replace(
                entry,
                replica_id=replica_id,
                epoch=entry.epoch + 1,
                last_used_s=self._clock(),
                size_bytes=0,
                in_turn=False,
                reported_s=None,
            )
        )

    def committed(self, session_id: str, *, tokens: int, turns: int) -> LedgerEntry:
        """Notes a committed turn: total tokens and turns of the session. Raises SessionNotFound."""
        entry = self.get(session_id)
        used = replace(entry, last_used_s=self._clock(), used_since_report=True)
        return self._put(replace(used, tokens=tokens, turns=turns))

    def touch(self, session_id: str) -> LedgerEntry:
        """Restarts the session's idle clock. Raises SessionNotFound."""
        return self._put(replace(self.get(session_id), last_used_s=self._clock(), used_since_report=True))

    def close_after(self, session_id: str, turn_key: str) -> LedgerEntry:
        """Notes that the session is to be closed when that turn has ended. Raises SessionNotFound."""
        return self._put(replace(self.get(session_id), closes_after=turn_key))

    def report(self, replica_id: str, update: SessionStatus) -> bool:
        """Notes what a replica says of a session it holds. False if it does not own it at that epoch."""
        entry = self._entries.get(update.session_id)
        if entry is None or entry.replica_id != replica_id or entry.epoch != update.epoch:
            return False
        self._put(
            replace(
                entry,
                size_bytes=update.size_bytes,
                in_turn=update.in_turn,
                reported_s=self._attended(),
                used_since_report=False,
                last_used_s=max(entry.last_used_s, self._clock() - update.idle_s),
            )
        )
        return True

    def expire(self, session_id: str) -> bool:
        """Forgets a session that was closed, has expired or is another cluster's. False if it was unknown."""
        entry = self._entries.pop(session_id, None)
        if entry is None:
            return False
        owned = self._by_replica[entry.replica_id]
        owned.discard(session_id)
        if not owned:
            del self._by_replica[entry.replica_id]
        use = self._by_tenant[entry.tenant]
        use.sessions -= 1
        use.tokens -= entry.tokens
        if not use.sessions:
            del self._by_tenant[entry.tenant]
        return True

    def entries(self) -> list[LedgerEntry]:
        return list(self._entries.values())

    def count_of(self, replica_id: str) -> int:
        return len(self._by_replica.get(replica_id, ()))

    def use_of(self, tenant: str) -> TenantUse:
        """Not to be changed."""
        return self._by_tenant.get(tenant, TenantUse())

    def _put(self, entry: LedgerEntry) -> LedgerEntry:
        self._by_tenant[entry.tenant].tokens += entry.tokens - self._entries[entry.session_id].tokens
        self._entries[entry.session_id] = entry
        return entry
