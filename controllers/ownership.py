"""OwnershipLedger: which replica owns which session, at which epoch. Pure logic, one owner.

Invariant: a session's epoch grows by one with every change of owner and never otherwise. So a former owner can always
be recognized. (The log ensures that a session with the id of a closed one starts at a higher epoch.)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from heapq import nlargest
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any

from controllers.deadlines import Deadlines
from controllers.errors import SessionExists, SessionNotFound, StaleEpoch
from controllers.recent_keys import RecentKeys
from controllers.records import LedgerEntry, SessionRecord, SessionStatus
from controllers.retention import expires_at_s
from controllers.session_keys import named, tenant_in
from controllers.sorted_keys import SortedKeys

MOST_RECENT = 1000
"""How many of the most recently used sessions are remembered in order."""


@dataclass(slots=True)
class TenantUse:
    """What a tenant has in the ledger: open sessions, and the tokens of their histories."""

    sessions: int = 0
    tokens: int = 0


@dataclass(slots=True)
class ReplicaUse:
    """The sessions that a replica owns, how many of them it has reported as held, how many of these as in a turn, and
    how much KV they have.

    `stale`: sessions that it has reported as held but that are now closed or owned elsewhere, with the epoch at which
    it holds them. They are kept only for a replica that `reports`, since it must be told to drop them. `told`: those
    that the last reply to it named. `overdue`: how many of these it still had in its next report.
    """

    owned: set[str] = field(default_factory=set)
    in_turn: int = 0
    size_bytes: int = 0
    held: int = 0
    reports: bool = False
    stale: dict[str, int] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    overdue: int = 0


Row = tuple[Any, ...]
"""A LedgerEntry's values, in the order of its fields. Python's garbage collector scans each object that refers to other
objects again and again, but not a tuple of plain values: a million entries would stop the controller for a second."""


class OwnershipLedger:
    """Sessions and their owners. `clock` returns Unix time in seconds, `attended` the controller's attended time.

    A method looks at all sessions only if its docstring says so.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        attended: Callable[[], float],
        entries: Iterable[LedgerEntry] = (),
        *,
        default_timeout_s: float = math.inf,
    ) -> None:
        self._clock = clock
        self._attended = attended
        self._default_timeout_s = default_timeout_s
        self._rows: dict[str, Row] = {}
        self._by_replica: dict[str, ReplicaUse] = {}
        self._by_tenant: dict[str, TenantUse] = {}
        self._tokens = 0
        keys: dict[str, list[str]] = {}
        for entry in entries:
            self._rows[entry.session_id] = _row(entry)
            self._count(entry)
            keys.setdefault(entry.tenant, []).append(entry.session_id)
        self._keys = {tenant: SortedKeys(own) for tenant, own in keys.items()}
        self._tenants = SortedKeys(keys)
        self._expiries = Deadlines(self._expires_at_s)
        self._expiries.watch_all(self._rows)
        last_used = nlargest(MOST_RECENT, self._rows.values(), key=_USED_AT)
        self._recent = RecentKeys(MOST_RECENT, (row[0] for row in reversed(last_used)))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._rows

    def configure(self, default_timeout_s: float) -> None:
        """Sets the idle timeout of sessions that were opened without one. Looks at all sessions if it has changed."""
        if default_timeout_s != self._default_timeout_s:
            self._default_timeout_s = default_timeout_s
            self._expiries.watch_all(self._rows)

    def open(self, record: SessionRecord) -> LedgerEntry:
        """Adds a session with its first owner. Raises SessionExists."""
        return self.add(LedgerEntry.of(record, self._clock()))

    def add(self, entry: LedgerEntry) -> LedgerEntry:
        """Adds a session as the log has it. Raises SessionExists."""
        if entry.session_id in self._rows:
            raise SessionExists(f"{named(entry.session_id)} is open already", "session_id")
        self._rows[entry.session_id] = _row(entry)
        self._count(entry)
        if entry.tenant not in self._keys:
            self._keys[entry.tenant] = SortedKeys()
            self._tenants.add(entry.tenant)
        self._keys[entry.tenant].add(entry.session_id)
        self._recent.used(entry.session_id)
        self._expiries.watch(entry.session_id, self.expires_at_s(entry))
        return entry

    def get(self, session_id: str) -> LedgerEntry:
        """The session's entry. Raises SessionNotFound."""
        row = self._rows.get(session_id)
        if row is None:
            raise SessionNotFound(f"no {named(session_id)}", "session_id")
        return LedgerEntry(*row)

    def fence(self, session_id: str, epoch: int, replica_id: str | None = None) -> LedgerEntry:
        """The session's entry, if its epoch is `epoch` and its owner is `replica_id` (None: any).

        Raises SessionNotFound and StaleEpoch.
        """
        entry = self.get(session_id)
        if entry.epoch != epoch:
            raise StaleEpoch(f"{named(session_id)} is at epoch {entry.epoch}, not {epoch}")
        if replica_id is not None and entry.replica_id != replica_id:
            raise StaleEpoch(f"{named(session_id)} is owned by {entry.replica_id!r}, not {replica_id!r}")
        return entry

    def transfer(self, session_id: str, replica_id: str) -> LedgerEntry:
        """Gives the session to another replica at the next epoch, which is no use of it. Raises SessionNotFound."""
        entry = self.get(session_id)
        self._leaves_owner(entry)
        moved = replace(
            entry,
            replica_id=replica_id,
            epoch=entry.epoch + 1,
            size_bytes=0,
            in_turn=False,
            reported_s=None,
        )
        self._rows[session_id] = _row(moved)
        self._count(moved)
        self._forget_unused(entry.replica_id)
        return moved

    def committed(self, session_id: str, *, tokens: int, turns: int) -> LedgerEntry:
        """Notes a committed turn, which is no longer in flight: total tokens and turns of the session. Raises
        SessionNotFound."""
        entry = self.get(session_id)
        now_s = self._clock()
        return self._put(
            replace(
                entry, last_used_s=now_s, used_since_report=True, tokens=tokens, turns=turns, in_turn=False
            ),
            entry,
        )

    def touch(self, session_id: str, used_s: float | None = None) -> LedgerEntry:
        """Restarts the session's idle clock as of `used_s` (None: now). Raises SessionNotFound."""
        entry = self.get(session_id)
        used_s = self._clock() if used_s is None else used_s
        return self._put(replace(entry, last_used_s=used_s, used_since_report=True), entry)

    def close_after(self, session_id: str, turn_key: str) -> LedgerEntry:
        """Notes that the session is to be closed when the turn with this key has ended. Raises SessionNotFound."""
        entry = self.get(session_id)
        closing = self._put(replace(entry, closes_after=turn_key), entry)
        self._expiries.watch(session_id, self.expires_at_s(closing))
        return closing

    def report(self, replica_id: str, update: SessionStatus) -> bool:
        """Notes a replica's report of a session that it holds. False if the replica does not own it at that epoch: it
        must then drop it, see `tell_stale`."""
        session_id, use = update.session_id, self._by_replica.setdefault(replica_id, ReplicaUse())
        entry = self._find(session_id)
        use.reports = True
        if entry is None or entry.replica_id != replica_id or entry.epoch != update.epoch:
            use.stale[session_id] = update.epoch
            return False
        use.stale.pop(session_id, None)
        use.held += entry.reported_s is None
        is_old = update.turns < entry.turns  # a turn that it tells of has been committed since
        self._put(
            replace(
                entry,
                size_bytes=update.size_bytes,
                in_turn=update.in_turn and not is_old,
                reported_s=self._attended(),
                used_since_report=is_old,
                last_used_s=max(entry.last_used_s, self._clock() - update.idle_s),
            ),
            entry,
        )
        return True

    def report_dropped(self, replica_id: str, session_ids: Iterable[str]) -> None:
        """Notes that the replica no longer holds these sessions, whether or not it owns them."""
        use = self._by_replica.get(replica_id)
        if use is None:
            return
        for session_id in session_ids:
            use.stale.pop(session_id, None)
            entry = self._find(session_id)
            if entry is not None and entry.replica_id == replica_id and entry.reported_s is not None:
                use.held -= 1
                self._put(replace(entry, reported_s=None, in_turn=False, size_bytes=0), entry)

    def tell_stale(self, replica_id: str) -> dict[str, int]:
        """The sessions that the replica must drop, with the epochs at which it reported them. For reading only, and for
        the reply to a report: what the previous reply named, too, is overdue."""
        use = self._by_replica.get(replica_id)
        if use is None:
            return {}
        use.overdue = len(use.stale.items() & use.told.items())
        use.told = use.stale.copy()
        return use.stale

    def forget_stale(self, replica_id: str) -> None:
        """Forgets what the replica must drop: it is gone, or must report all its sessions again."""
        use = self._by_replica.get(replica_id)
        if use is not None:
            use.reports, use.overdue = False, 0
            use.stale.clear()
            use.told.clear()
            self._forget_unused(replica_id)

    def expire(self, session_id: str) -> bool:
        """Removes a session that was closed, has expired or now belongs to another cluster. False if it was unknown."""
        entry = self._find(session_id)
        if entry is None:
            return False
        del self._rows[session_id]
        self._expiries.forget(session_id)
        self._recent.forget(session_id)
        self._leaves_owner(entry)
        self._forget_unused(entry.replica_id)
        use, keys = self._by_tenant[entry.tenant], self._keys[entry.tenant]
        keys.discard(session_id)
        if not use.sessions:
            del self._by_tenant[entry.tenant], self._keys[entry.tenant]
            self._tenants.discard(entry.tenant)
        return True

    def page(
        self, tenant: str | None = None, after: str | None = None, limit: int | None = None
    ) -> list[LedgerEntry]:
        """The first `limit` sessions (None: all) of the tenant (None: of all tenants) after the session key `after`,
        ordered by tenant and key. No session need have the key `after`. O(limit + log n)."""
        return list(map(self.get, islice(self._keys_after(tenant, after), limit)))

    def recent(self, limit: int) -> list[LedgerEntry]:
        """The most recently used sessions, newest first: at most `limit` and MOST_RECENT of them, and fewer if some of
        these have ended. O(limit)."""
        return list(map(self.get, islice(self._recent.newest_first(), limit)))

    def count_of(self, replica_id: str) -> int:
        """How many sessions the replica owns."""
        return len(self.use_of_replica(replica_id).owned)

    def use_of_replica(self, replica_id: str) -> ReplicaUse:
        """What the replica has in the ledger. For reading only."""
        return self._by_replica.get(replica_id, ReplicaUse())

    def use_of_tenant(self, tenant: str) -> TenantUse:
        """What the tenant has in the ledger. For reading only."""
        return self._by_tenant.get(tenant, TenantUse())

    @property
    def tokens(self) -> int:
        """Tokens of all histories."""
        return self._tokens

    def expires_at_s(self, entry: LedgerEntry) -> float:
        """When the session's idle timeout ends, if nobody uses it."""
        return expires_at_s(entry, self._default_timeout_s)

    def past_timeout(self, now_s: float) -> Iterator[LedgerEntry]:
        """Sessions whose idle timeout is over at the Unix time `now_s`. Besides these it looks only at sessions that
        were used since the last look. It looks at a session only when it is asked for the next one, and sessions may
        change and end meanwhile."""
        return map(self.get, self._expiries.due(now_s))

    def soonest_expiry_s(self) -> float | None:
        """No further session's timeout ends before this time. None: there are no sessions."""
        return self._expiries.soonest_s()

    def _expires_at_s(self, session_id: str) -> float:
        return self.expires_at_s(self.get(session_id))

    def _find(self, session_id: str) -> LedgerEntry | None:
        row = self._rows.get(session_id)
        return None if row is None else LedgerEntry(*row)

    def _keys_after(self, tenant: str | None, after: str | None) -> Iterator[str]:
        if tenant is not None:
            if tenant in self._keys:
                yield from self._keys[tenant].after(after or "")
            return
        if after is not None:
            yield from self._keys_after(tenant_in(after), after)
        for each in self._tenants if after is None else self._tenants.after(tenant_in(after)):
            yield from self._keys[each]

    def _count(self, entry: LedgerEntry) -> None:
        """Counts the session for its owner and its tenant."""
        use = self._by_replica.setdefault(entry.replica_id, ReplicaUse())
        use.owned.add(entry.session_id)
        tenant = self._by_tenant.setdefault(entry.tenant, TenantUse())
        tenant.sessions += 1
        tenant.tokens += entry.tokens
        self._tokens += entry.tokens
        use.size_bytes += entry.size_bytes

    def _leaves_owner(self, entry: LedgerEntry) -> None:
        """The reverse of `_count`. If the owner has reported the session as held, it must be told to drop it."""
        use, tenant = self._by_replica[entry.replica_id], self._by_tenant[entry.tenant]
        use.owned.discard(entry.session_id)
        use.in_turn -= entry.in_turn
        use.held -= entry.reported_s is not None
        if entry.reported_s is not None and use.reports:
            use.stale[entry.session_id] = entry.epoch
        tenant.sessions -= 1
        tenant.tokens -= entry.tokens
        self._tokens -= entry.tokens
        use.size_bytes -= entry.size_bytes

    def _forget_unused(self, replica_id: str) -> None:
        use = self._by_replica[replica_id]
        if not use.owned and not use.reports:
            del self._by_replica[replica_id]

    def _put(self, entry: LedgerEntry, before: LedgerEntry) -> LedgerEntry:
        grown = entry.tokens - before.tokens
        self._by_tenant[entry.tenant].tokens += grown
        self._tokens += grown
        if (entry.in_turn, entry.size_bytes) != (before.in_turn, before.size_bytes):
            use = self._by_replica[entry.replica_id]
            use.in_turn += entry.in_turn - before.in_turn
            use.size_bytes += entry.size_bytes - before.size_bytes
        self._rows[entry.session_id] = _row(entry)
        if entry.last_used_s > before.last_used_s:
            self._recent.used(entry.session_id)
        return entry


_VALUES = attrgetter(*(field.name for field in fields(LedgerEntry)))
_USED_AT = itemgetter([field.name for field in fields(LedgerEntry)].index("last_used_s"))


def _row(entry: LedgerEntry) -> Row:
    """The entry's row. Names of replicas and tenants are interned, so each is stored once."""
    session_id, tenant, replica_id, *rest = _VALUES(entry)
    return (session_id, sys.intern(tenant), sys.intern(replica_id), *rest)
