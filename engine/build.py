"""Composition root: puts an engine together from its settings. Nothing else in the engine knows all the parts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from cache.pages import PageAllocator
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import pages_for
from cache.session_cache import SessionAwareCache
from cache.tiers import TierSizes
from cache.window import WindowPool
from engine.api import DeltaSink
from engine.build_runner import DEFAULT_EXECUTION, make_rank, make_runner
from engine.device import resolve_device
from engine.engine import LocalEngine
from engine.models.loader import LoadedModel
from engine.parallel.lead import lead
from engine.parallel.local_ranks import HOST, LocalRanks
from engine.parallel.protocol import Timeouts
from engine.parallel.ranks import OneRank
from engine.parallel.team import RankStarter, gather_team
from engine.runner.kv_pool import PoolTooSmall
from engine.runner.protocol import Runner, RunnerFacts
from engine.scheduler import Scheduler
from engine.settings import (
    CacheSettings,
    EngineSettings,
    ExecutionSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.proposers import DraftModelProposer, NoProposer, Proposer
from engine.speculative.step_costs import StepCosts, step_costs
from engine.stats import EngineCounters
from engine.step_thread import StepDriver
from engine.stops import StopCriteria

STOP_S = 5.0


def build_engine(settings: EngineSettings, sink: DeltaSink) -> LocalEngine:
    """An engine with the settings' model, not started. Its other ranks are child processes of this one.

    Raises engine.models.errors.ModelError, engine.device.DeviceUnavailable, engine.memory.MemoryShort,
    engine.runner.kv_pool.PoolTooSmall, engine.attention.interface.AttentionUnavailable,
    engine.runner.disk_folder.DiskUnavailable, or engine.parallel.protocol.RanksNotStarted.
    """
    if settings.execution.tensor_parallel > 1:
        return build_parallel_engine(settings, sink)
    runner, loaded = make_rank(settings, OneRank())
    return _engine(runner, loaded, settings, sink)


def build_parallel_engine(
    settings: EngineSettings,
    sink: DeltaSink,
    start: RankStarter | None = None,
    host: str = HOST,
    timeouts: Timeouts | None = None,
) -> LocalEngine:
    """An engine of `settings.execution.tensor_parallel` ranks, not started; this process is rank 0.

    `start` starts the other ranks, which connect to this one at `host`; without it they are child processes of this
    one. Raises what build_engine raises. The engine stops when a rank is lost.
    """
    starter = start or LocalRanks(settings, make_runner)
    size, device = settings.execution.tensor_parallel, resolve_device(settings.model.device)
    team = gather_team(size, host, device, starter, timeouts)
    try:
        runner, loaded = make_rank(settings, team.ranks)
        engine = _engine(lead(runner, team), loaded, settings, sink)
    except BaseException:
        team.close()
        raise
    team.when_lost(_stopper(engine))
    return engine


def assemble_engine(
    runner: Runner,
    cache: CacheSettings,
    scheduler: SchedulerSettings,
    speculation: SpeculationSettings,
    eos_token_ids: frozenset[int],
    sink: DeltaSink,
    execution: ExecutionSettings = DEFAULT_EXECUTION,
    *,
    driver: StepDriver | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> LocalEngine:
    """An engine around a given runner, not started. The runner sizes the pools, and may be asked for a few steps to see
    what they cost. For `driver` and `clock` see
    LocalEngine."""
    counters = EngineCounters()
    costs = (
        None if speculation.method == "off" else step_costs(speculation, runner, scheduler.max_batch_tokens)
    )
    facts = runner.facts
    sizes = TierSizes(
        cache.host_size_bytes, cache.disk_size_bytes, facts.page_size_bytes, facts.window_page_size_bytes
    )
    step_tokens = max(min(scheduler.chunk_size, scheduler.max_batch_tokens), execution.decode_steps)
    step_tokens = step_tokens * (2 if facts.runs_ahead else 1) + speculation.max_draft_tokens
    window = _window_pool(facts, step_tokens)
    allocator = PageAllocator(facts.num_pages)
    prefixes = PrefixCache(
        allocator, facts.page_size, enabled=cache.prefix_cache, window=window, identity=facts.identity
    )
    sessions = SessionAwareCache(prefixes, sizes, step_tokens, clock)
    context_len = min(scheduler.max_context_len or facts.max_context_len, facts.max_context_len)
    planner = Scheduler(
        sessions,
        StopCriteria(eos_token_ids, context_len, facts.vocab_size),
        scheduler,
        counters,
        _proposer(speculation, costs, eos_token_ids),
        mirrors_prompts=speculation.method == "draft",
        decode_steps=execution.decode_steps,
        clock=clock,
    )
    return LocalEngine(
        sessions,
        planner,
        runner,
        counters,
        scheduler,
        sink,
        cache.books,
        driver=driver,
        clock=clock,
        about={} if costs is None else costs.describe(),
    )


def _engine(runner: Runner, loaded: LoadedModel, settings: EngineSettings, sink: DeltaSink) -> LocalEngine:
    return assemble_engine(
        runner,
        settings.cache,
        settings.scheduler,
        settings.speculation,
        loaded.eos_token_ids,
        sink,
        settings.execution,
    )


def _stopper(engine: LocalEngine) -> Callable[[], None]:
    """Returns a function that stops the engine on a separate thread, since the engine's own thread may be the one that
    notices a loss."""

    def stop() -> None:
        engine.stop(STOP_S)

    return lambda: threading.Thread(target=stop, name="kedge-engine-stop", daemon=True).start()


def _proposer(
    speculation: SpeculationSettings, costs: StepCosts | None, eos_token_ids: frozenset[int]
) -> Proposer:
    if costs is None:
        return NoProposer()
    if speculation.method == "ngram":
        return NgramProposer(speculation.ngram_size, speculation.max_draft_tokens, costs, eos_token_ids)
    return DraftModelProposer(speculation.max_draft_tokens, costs)


def _window_pool(facts: RunnerFacts, step_tokens: int) -> WindowPool | None:
    """Raises PoolTooSmall if a single sequence could run out of window pages. It needs pages for what it sees, for what
    a rollback of its turn would see, and for a step."""
    if facts.window_len is None:
        return None
    needed = pages_for(2 * (facts.window_len + 1) + step_tokens, facts.page_size) + 5
    longest = pages_for(facts.max_context_len, facts.page_size)
    if facts.num_window_pages < min(needed, longest):
        raise PoolTooSmall(
            f"windows of {facts.window_len} tokens need {min(needed, longest)} window pages, "
            f"the pool has {facts.num_window_pages}"
        )
    return WindowPool(PageAllocator(facts.num_window_pages), facts.page_size, facts.window_len)
