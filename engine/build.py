"""Composition root: puts an engine together from its settings. Nothing else in the engine knows all the parts."""

from __future__ import annotations

from cache.pages import PageAllocator
from cache.prefix_cache import RadixPrefixCache
from cache.session_cache import SessionAwareCache
from engine.api import DeltaSink
from engine.counters import EngineCounters
from engine.engine import LocalEngine
from engine.runner.protocol import Runner
from engine.scheduler import Scheduler
from engine.settings import CacheSettings, SchedulerSettings
from engine.stops import StopCriteria


def assemble_engine(
    runner: Runner,
    cache: CacheSettings,
    scheduler: SchedulerSettings,
    eos_token_ids: frozenset[int],
    sink: DeltaSink,
) -> LocalEngine:
    """An engine around a given runner, not started. The runner sizes the pool."""
    counters = EngineCounters()
    allocator = PageAllocator(runner.num_pages)
    prefixes = RadixPrefixCache(allocator, runner.page_size, enabled=cache.prefix_cache)
    sessions = SessionAwareCache(prefixes)
    context_len = min(scheduler.max_context_len or runner.max_context_len, runner.max_context_len)
    stops = StopCriteria(eos_token_ids, context_len)
    return LocalEngine(
        sessions, Scheduler(sessions, stops, scheduler, counters), runner, counters, scheduler, sink
    )
