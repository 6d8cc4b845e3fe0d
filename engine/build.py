"""Composition root: puts an engine together from its settings. Nothing else in the engine knows all the parts."""

from __future__ import annotations

from cache.pages import PageAllocator
from cache.prefix_cache import RadixPrefixCache
from cache.sequence_kv import pages_for
from cache.session_cache import SessionAwareCache
from cache.tiers import HostTier
from cache.window import WindowPool
from engine.api import DeltaSink
from engine.build_runner import build_runner
from engine.counters import EngineCounters
from engine.device import resolve_device
from engine.engine import LocalEngine
from engine.models.errors import UnsupportedModel
from engine.models.loader import LoadedModel, load_model
from engine.models.ops import choose_ops
from engine.runner.kv_pool import PoolTooSmall
from engine.runner.protocol import Runner
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
from engine.stops import StopCriteria

DEFAULT_EXECUTION = ExecutionSettings()


def build_engine(settings: EngineSettings, sink: DeltaSink) -> LocalEngine:
    """An engine with the settings' model, not started.

    Raises engine.models.errors.ModelError, engine.device.DeviceUnavailable or engine.runner.kv_pool.PoolTooSmall.
    """
    ops = choose_ops(resolve_device(settings.model.device))
    loaded = load_model(settings.model, ops=ops)
    speculation = settings.speculation
    runner = build_runner(
        loaded,
        settings.cache,
        _load_draft(loaded, speculation),
        scheduler=settings.scheduler,
        execution=settings.execution,
        num_drafts=speculation.max_draft_tokens if speculation.method != "off" else 0,
    )
    return assemble_engine(
        runner,
        settings.cache,
        settings.scheduler,
        settings.speculation,
        loaded.eos_token_ids,
        sink,
        settings.execution,
    )


def assemble_engine(
    runner: Runner,
    cache: CacheSettings,
    scheduler: SchedulerSettings,
    speculation: SpeculationSettings,
    eos_token_ids: frozenset[int],
    sink: DeltaSink,
    execution: ExecutionSettings = DEFAULT_EXECUTION,
) -> LocalEngine:
    """An engine around a given runner, not started. The runner sizes the pools."""
    counters = EngineCounters()
    host = HostTier(cache.host_size_bytes, runner.page_size_bytes, runner.window_page_size_bytes)
    step_tokens = max(min(scheduler.chunk_size, scheduler.max_batch_tokens), execution.decode_steps)
    step_tokens = step_tokens * (2 if runner.runs_ahead else 1) + speculation.max_draft_tokens
    window = _window_pool(runner, step_tokens)
    allocator = PageAllocator(runner.num_pages)
    prefixes = RadixPrefixCache(allocator, runner.page_size, enabled=cache.prefix_cache, window=window)
    sessions = SessionAwareCache(prefixes, host, step_tokens)
    context_len = min(scheduler.max_context_len or runner.max_context_len, runner.max_context_len)
    planner = Scheduler(
        sessions,
        StopCriteria(eos_token_ids, context_len),
        scheduler,
        counters,
        _proposer(speculation, eos_token_ids),
        mirrors_prompts=speculation.method == "draft",
        decode_steps=execution.decode_steps,
    )
    return LocalEngine(sessions, planner, runner, counters, scheduler, sink, cache.books)


def _load_draft(target: LoadedModel, speculation: SpeculationSettings) -> LoadedModel | None:
    if speculation.method != "draft":
        return None
    if speculation.draft_model is None:
        raise UnsupportedModel("speculation with a draft model needs draft_model")
    draft = load_model(speculation.draft_model)
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the model one of {target.vocab_size}"
        )
    return draft


def _proposer(speculation: SpeculationSettings, eos_token_ids: frozenset[int]) -> Proposer:
    longest, row_cost = speculation.max_draft_tokens, speculation.row_cost
    if speculation.method == "ngram":
        return NgramProposer(speculation.ngram_size, longest, row_cost, eos_token_ids)
    if speculation.method == "draft":
        return DraftModelProposer(longest, row_cost, speculation.draft_cost)
    return NoProposer()


def _window_pool(runner: Runner, step_tokens: int) -> WindowPool | None:
    """Raises PoolTooSmall if a single sequence could run out of window pages: what it sees, what a rollback of its
    turn would see, and a step."""
    if runner.window_len is None:
        return None
    needed = pages_for(2 * (runner.window_len + 1) + step_tokens, runner.page_size) + 5
    longest = pages_for(runner.max_context_len, runner.page_size)
    if runner.num_window_pages < min(needed, longest):
        raise PoolTooSmall(
            f"windows of {runner.window_len} tokens need {min(needed, longest)} window pages, "
            f"the pool has {runner.num_window_pages}"
        )
    return WindowPool(PageAllocator(runner.num_window_pages), runner.page_size, runner.window_len)
