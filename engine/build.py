"""Composition root: puts an engine together from its settings. Nothing else in the engine knows all the parts."""

from __future__ import annotations

from cache.pages import PageAllocator
from cache.prefix_cache import RadixPrefixCache
from cache.session_cache import SessionAwareCache
from engine.api import DeltaSink
from engine.attention.torch_backend import TorchAttention
from engine.counters import EngineCounters
from engine.engine import LocalEngine
from engine.models.loader import load_model
from engine.runner.kv_pool import make_kv_pool
from engine.runner.protocol import Runner
from engine.runner.torch_runner import TorchRunner
from engine.scheduler import Scheduler
from engine.settings import CacheSettings, EngineSettings, SchedulerSettings
from engine.stops import StopCriteria


def build_engine(settings: EngineSettings, sink: DeltaSink) -> LocalEngine:
    """An engine with the settings' model, not started.

    Raises engine.models.errors.ModelError, engine.device.DeviceUnavailable or engine.runner.kv_pool.PoolTooSmall.
    """
    loaded = load_model(settings.model)
    pool = make_kv_pool(loaded.spec, settings.cache, loaded.dtype, loaded.device)
    runner = TorchRunner(
        loaded.model, pool, TorchAttention(pool), loaded.spec.vocab_size, loaded.max_context_len
    )
    return assemble_engine(runner, settings.cache, settings.scheduler, loaded.eos_token_ids, sink)


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
