"""Which faults befell which parties, and when: the reasons that a cluster may have to take a replica for gone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

EVERYBODY = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault. `names` are the parties that it befell; EVERYBODY stands for all."""

    kind: str
    names: frozenset[str]
    begin_s: float
    end_s: float


class Troubles:
    """All faults of a run. `clock` returns its virtual time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: list[Trouble] = []

    def note(self, kind: str, names: Collection[str], lasts_s: float) -> None:
        """Adds a fault that begins now."""
        now_s = self._clock()
        self._all.append(Trouble(kind, frozenset(names), now_s, now_s + lasts_s))

    def lasted_s(self, kinds: Collection[str], name: str, within_s: float) -> float:
        """For how long such faults befell the party within the last `within_s` seconds. Overlapping faults are added
        up."""
        now_s = self._clock()
        return sum(
            max(0.0, min(each.end_s, now_s) - max(each.begin_s, now_s - within_s))
            for each in self._all
            if each.kind in kinds and not each.names.isdisjoint((name, EVERYBODY))
        )

    def any_since(self, kinds: Collection[str], since_s: float) -> bool:
        """Whether there was such a fault, of any party, that had not ended by `since_s`."""
        return any(each.kind in kinds and each.end_s >= since_s for each in self._all)
