"""Counters of the engine's thread, and the snapshots of its state that other threads read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cache.session_cache import SessionAwareCache
from engine.api import EngineStats
from engine.runner.protocol import RunnerFacts

PERIOD_S = 0.1


@dataclass(slots=True)
class EngineCounters:
    """Counts since start. Written only on the engine's thread."""

    steps: int = 0
    retractions: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class Load(Protocol):
    """What the scheduler reports about its load."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def kv_utilization(self) -> float: ...


class StatsBoard:
    """Publishes EngineStats. Any thread may read `latest`; all else belongs to the engine's thread. `clock` returns
    monotonic seconds."""

    def __init__(
        self,
        cache: SessionAwareCache,
        scheduler: Load,
        counters: EngineCounters,
        facts: RunnerFacts,
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._scheduler = scheduler
        self._counters = counters
        self._facts = facts
        self._clock = clock
        self._due_s = 0.0
        self.latest = self._take()

    def publish(self, *, now: bool) -> None:
        """Takes a new snapshot every PERIOD_S, or `now`."""
        time_s = self._clock()
        if now or time_s >= self._due_s:
            self.latest = self._take()
            self._due_s = time_s + PERIOD_S

    def _take(self) -> EngineStats:
        counters, tiers = self._counters, self._cache.tiers
        host, disk = tiers.accounts()
        return EngineStats(
            pages=self._cache.books.accounts(),
            window_pages=self._cache.books.window_accounts(),
            host=host,
            disk=disk,
            page_size=self._cache.page_size,
            page_size_bytes=self._facts.page_size_bytes,
            window_len=self._facts.window_len,
            window_page_size_bytes=self._facts.window_page_size_bytes,
            sessions=self._cache.num_sessions,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_utilization=self._scheduler.kv_utilization,
            steps=counters.steps,
            retractions=counters.retractions,
            demotions_to_host=tiers.num_to_host,
            demotions_to_disk=tiers.num_to_disk,
            demotions_to_log=tiers.num_to_log,
            promotions_from_host=tiers.num_from_host,
            promotions_from_disk=tiers.num_from_disk,
            disk_failures=tiers.num_disk_failures,
            evicted_pages=self._cache.evicted.full,
            evicted_window_pages=self._cache.evicted.window,
            generated_tokens=counters.generated_tokens,
            prefill_tokens=counters.prefill_tokens,
            cached_tokens=counters.cached_tokens,
            draft_tokens=counters.draft_tokens,
            accepted_draft_tokens=counters.accepted_draft_tokens,
        )
