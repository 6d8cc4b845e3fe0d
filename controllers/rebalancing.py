"""When a session moves to a less busy replica. Pure policy, one owner.

A replica's load is its turns in flight, running and waiting, averaged over AVERAGED_S. A session may move when a turn
of it begins at a replica that is clearly busier than another. The other one then computes the session's KV again. So
that moves never cost more than they gain, they are paid from a credit. Each second, half the difference in load (the
turns that would have had a better place) is added to the busier replica's credit. Each move takes its price from it.

Invariant: a move goes from the busier to the less busy replica, and only if their loads differ by more than the move
evens out. So it lowers the sum of squared loads, and under constant loads moves come to an end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from controllers.records import LedgerEntry
from controllers.settings import RebalancingSettings

AVERAGED_S = 10.0
CLEARLY = 1.5
"""The factor by which a replica must be busier than another before anything moves."""
MOVE_S = 1.0
"""The price of a move besides the KV that is computed again: the calls to the controller, and a margin."""
MOST_CREDIT_S = 60.0


@dataclass(slots=True, eq=False)
class _Load:
    """A replica's load. `since_s` is when it was first reported. `credit_s` is the time of turns that could have had a
    better place, in seconds, less the price of moves. No credit is added until the load is an average: a replica may be
    busy only for a moment when it first reports."""

    turns: float
    seen_s: float
    since_s: float
    credit_s: float = 0.0


class Rebalancing:
    """Loads by replica id. `timer` returns monotonic seconds without the spans in which no replica could report. In all
    methods, `takers` are the replicas that may take a session now."""

    def __init__(self, settings: RebalancingSettings, timer: Callable[[], float]) -> None:
        self._settings = settings
        self._timer = timer
        self._loads: dict[str, _Load] = {}

    def report(self, replica_id: str, turns: int, takers: Collection[str]) -> bool:
        """Notes the turns in flight at a replica. True if it is crowded, so that sessions may move away from it.

        Forgets all replicas except this one and the takers.
        """
        now_s = self._timer()
        known = {replica_id, *takers}
        self._loads = {name: load for name, load in self._loads.items() if name in known}
        load = self._loads.setdefault(replica_id, _Load(turns, now_s, now_s))
        elapsed_s = now_s - load.seen_s
        load.turns += (turns - load.turns) * (1 - math.exp(-elapsed_s / AVERAGED_S))
        load.seen_s = now_s
        gap = self._gap(load, self._least_busy(takers))
        known_for_s = now_s - load.since_s
        counted_s = min(elapsed_s, max(0.0, known_for_s - AVERAGED_S))
        load.credit_s = (
            min(load.credit_s + gap / 2 * counted_s / self._settings.shards, MOST_CREDIT_S) if gap else 0.0
        )
        return gap > 0

    def choose(self, replica_id: str, kv_tokens: int, takers: Collection[str]) -> str | None:
        """Where a session goes when a turn of it begins at this replica. None: it stays. `kv_tokens` is the KV that a
        move throws away."""
        load, taker = self._loads.get(replica_id), self._least_busy(takers)
        if load is None or not self._gap(load, taker) or load.credit_s < self._price_s(kv_tokens):
            return None
        return taker

    def moved(self, replica_id: str, taker: str, kv_tokens: int) -> None:
        """Notes that the session moved to the taker that `choose` returned. The loads include it before replicas report
        it."""
        load = self._loads[replica_id]
        load.credit_s -= self._price_s(kv_tokens)
        load.turns -= 1
        self._loads[taker].turns += 1

    def _least_busy(self, takers: Collection[str]) -> str | None:
        """The least busy of the takers that have reported; None if none has."""
        known = [taker for taker in takers if taker in self._loads]
        return min(known, key=lambda taker: (self._loads[taker].turns, taker), default=None)

    def _gap(self, load: _Load, taker: str | None) -> float:
        """By how many turns the replica is clearly busier than the taker; 0 if it is not."""
        if taker is None:
            return 0.0
        other = self._loads[taker].turns
        gap = load.turns - other
        return gap if gap >= self._settings.min_gap and load.turns >= CLEARLY * other else 0.0

    def _price_s(self, kv_tokens: int) -> float:
        return MOVE_S + kv_tokens / self._settings.tokens_per_s


def kv_tokens_at_owner(entry: LedgerEntry) -> int:
    """Tokens whose KV a move throws away: 0 if the owner reported that it has none, and the session was not used
    since."""
    told = entry.reported_s is not None and not entry.used_since_report
    return 0 if told and not entry.in_turn and entry.size_bytes == 0 else entry.tokens
