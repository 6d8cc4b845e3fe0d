"""Puts an engine together around any runner. It imports no torch: a runner that needs none starts in a second less."""

from __future__ import annotations

import time
from collections.abc import Callable

from cache.pages import PageAllocator
from cache.prefix_cache import PrefixCache
from cache.sequence_kv import pages_for
from cache.session_cache import SessionAwareCache
from cache.tiers import TierSizes
from cache.window import WindowPool
from engine.api import DeltaSink
from engine.engine import LocalEngine
from engine.runner.protocol import Runner, RunnerFacts
from engine.scheduler import Scheduler
from engine.settings import (
    DEFAULT_EXECUTION,
    CacheSettings,
    ExecutionSettings,
    PoolTooSmall,
    SchedulerSettings,
    SpeculationSettings,
)
from engine.speculative.ngram_proposer import NgramProposer
from engine.speculative.proposers import DraftModelProposer, NoProposer, Proposer
from engine.speculative.step_costs import StepCosts, step_costs
from engine.stats import EngineCounters
from engine.step_thread import StepDriver, StepThread
from engine.stops import StopCriteria


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
    what they cost. `driver` runs the step loop (None: a StepThread). `clock` returns monotonic seconds. Raises
    PoolTooSmall."""
    counters = EngineCounters()
    facts = runner.facts
    sizes = TierSizes(
        cache.host_size_bytes, cache.disk_size_bytes, facts.page_size_bytes, facts.window_page_size_bytes
    )
    step_tokens = max(min(scheduler.chunk_size, scheduler.max_batch_tokens), execution.decode_steps)
    step_tokens = step_tokens * (2 if facts.runs_ahead else 1) + speculation.max_draft_tokens
    window = _window_pool(facts, step_tokens)  # first: measured steps need pages that there are
    costs = (
        None if speculation.method == "off" else step_costs(speculation, runner, scheduler.max_batch_tokens)
    )
    allocator = PageAllocator(facts.num_pages)
    prefixes = PrefixCache(
        allocator, facts.page_size, enabled=cache.prefix_cache, window=window, identity=facts.identity
    )
    sessions = SessionAwareCache(prefixes, sizes, step_tokens, clock)
    max_context_len = min(scheduler.max_context_len or facts.max_context_len, facts.max_context_len)
    planner = Scheduler(
        sessions,
        StopCriteria(eos_token_ids, max_context_len, facts.vocab_size),
        scheduler,
        counters,
        _proposer(speculation, costs),
        mirrors_prompts=speculation.method == "draft",
        decode_steps=execution.decode_steps,
        clock=clock,
    )
    return LocalEngine(
        sessions,
        planner,
        runner,
        counters,
        sink,
        books=cache.books,
        max_waiting=scheduler.max_waiting,
        max_context_len=max_context_len,
        driver=driver or StepThread(),
        clock=clock,
        about={} if costs is None else costs.describe(),
    )


def _proposer(speculation: SpeculationSettings, costs: StepCosts | None) -> Proposer:
    if costs is None:
        return NoProposer()
    if speculation.method == "ngram":
        return NgramProposer(speculation.ngram_size, speculation.max_draft_tokens, costs)
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
