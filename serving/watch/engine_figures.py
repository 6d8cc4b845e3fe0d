"""Figures from the engine's snapshot. They are read when asked for, so they cannot drift from the books."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from cache.audit import PageAccounts, PoolName
from engine.api import EngineStats
from serving.watch.registry import Figure

PAGE_ACCOUNTS = ("free", "cached", "protected", "session", "in_flight", "leaked")

READ: Mapping[str, Callable[[EngineStats], float]] = MappingProxyType(
    {
        "kedge_sessions": lambda s: s.sessions,
        "kedge_requests_running": lambda s: s.running,
        "kedge_requests_waiting": lambda s: s.waiting,
        "kedge_kv_utilization": lambda s: s.kv_utilization,
        "kedge_host_kv_bytes": lambda s: s.host.used_bytes,
        "kedge_host_kv_budget_bytes": lambda s: s.host.budget_bytes,
        "kedge_host_sessions": lambda s: s.host.sessions,
        "kedge_disk_kv_bytes": lambda s: s.disk.used_bytes,
        "kedge_disk_kv_budget_bytes": lambda s: s.disk.budget_bytes,
        "kedge_disk_sessions": lambda s: s.disk.sessions,
        "kedge_engine_steps": lambda s: s.steps,
        "kedge_retractions": lambda s: s.retractions,
        "kedge_disk_failures": lambda s: s.disk_failures,
        "kedge_generated_tokens": lambda s: s.generated_tokens,
        "kedge_prefill_tokens": lambda s: s.prefill_tokens,
        "kedge_cached_tokens": lambda s: s.cached_tokens,
        "kedge_draft_tokens": lambda s: s.draft_tokens,
        "kedge_accepted_draft_tokens": lambda s: s.accepted_draft_tokens,
    }
)


def engine_figures(stats: EngineStats) -> Iterator[Figure]:
    for name, read in READ.items():
        yield Figure(name, read(stats))
    for pool, pages in pools_of(stats).items():
        yield Figure("kedge_kv_pool_pages", pages.total, (pool,))
        for account, count in pages_by_account(pages).items():
            yield Figure("kedge_kv_pages", count, (pool, account))
        evicted = stats.evicted_pages if pool == "full" else stats.evicted_window_pages
        yield Figure("kedge_evicted_pages", evicted, (pool,))
    for tier, count in (
        ("host", stats.demotions_to_host),
        ("disk", stats.demotions_to_disk),
        ("log", stats.demotions_to_log),
    ):
        yield Figure("kedge_demotions", count, (tier,))
    for tier, count in (("host", stats.promotions_from_host), ("disk", stats.promotions_from_disk)):
        yield Figure("kedge_promotions", count, (tier,))


def pages_by_account(pages: PageAccounts) -> dict[str, int]:
    """The books of one pool as label → pages; together they add up to the pool."""
    return {account: getattr(pages, account) for account in PAGE_ACCOUNTS}


def pools_of(stats: EngineStats) -> dict[PoolName, PageAccounts]:
    """The books of each pool that the engine has."""
    if stats.window_pages is None:
        return {"full": stats.pages}
    return {"full": stats.pages, "window": stats.window_pages}
