"""A clock that only moves when a test says so."""

from __future__ import annotations


class ManualClock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        self.now_s += by_s
