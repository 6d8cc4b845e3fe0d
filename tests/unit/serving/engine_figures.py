"""Figures of an engine, each with a value of its own."""

from __future__ import annotations

from cache.audit import PageAccounts, TierAccounts
from engine.api import EngineStats


def stats(*, window: PageAccounts | None = None, **pages: int) -> EngineStats:
    accounts = {"total": 10, "free": 4, "cached": 3, "protected": 1, "session": 1, "in_flight": 0} | pages
    return EngineStats(
        pages=PageAccounts(**accounts),
        window_pages=window,
        host=TierAccounts(budget_bytes=4096, used_bytes=1024, sessions=1),
        disk=TierAccounts(budget_bytes=8192, used_bytes=6144, sessions=3),
        page_size=16,
        page_size_bytes=1024,
        window_len=None,
        window_page_size_bytes=0,
        sessions=2,
        running=1,
        waiting=5,
        kv_utilization=0.25,
        steps=100,
        retractions=3,
        demotions_to_host=2,
        demotions_to_disk=4,
        demotions_to_log=1,
        promotions_from_host=1,
        promotions_from_disk=2,
        disk_failures=6,
        evicted_pages=7,
        evicted_window_pages=5,
        generated_tokens=400,
        prefill_tokens=900,
        cached_tokens=800,
        draft_tokens=50,
        accepted_draft_tokens=30,
    )
