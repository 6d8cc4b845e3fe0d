"""Metric pages: families are merged, not repeated, and the engine's books appear by account."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cache.audit import PageAccounts, TierAccounts
from engine.api import EngineStats
from serving.watch.metrics import (
    IngressMetrics,
    ReplicaMetrics,
    merge_expositions,
    pages_by_account,
    render_gauges,
)


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
        generated_tokens=400,
        prefill_tokens=900,
        cached_tokens=800,
        draft_tokens=50,
        accepted_draft_tokens=30,
    )


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_accounts_make_up_the_pool() -> None:
    pages = stats(in_flight=3).pages
    assert sum(pages_by_account(pages).values()) == pages.total
    assert pages_by_account(pages)["leaked"] == -2


def test_replica_page() -> None:
    metrics = ReplicaMetrics("a", stats)
    metrics.turn_ended("committed")
    metrics.first_token(0.004)
    metrics.next_tokens(4, 0.004)
    found = samples(metrics.render())
    assert found["kedge_kv_pages", (("account", "leaked"), ("pool", "full"), ("replica", "a"))] == 1
    assert found["kedge_kv_pages", (("account", "free"), ("pool", "full"), ("replica", "a"))] == 4
    assert found["kedge_kv_pool_pages", (("pool", "full"), ("replica", "a"))] == 10
    assert not any(("pool", "window") in labels for _, labels in found)
    assert found["kedge_sessions", (("replica", "a"),)] == 2
    assert found["kedge_requests_waiting", (("replica", "a"),)] == 5
    assert found["kedge_retractions_total", (("replica", "a"),)] == 3
    assert found["kedge_demotions_total", (("replica", "a"), ("tier", "host"))] == 2
    assert found["kedge_demotions_total", (("replica", "a"), ("tier", "log"))] == 1
    assert found["kedge_demotions_total", (("replica", "a"), ("tier", "disk"))] == 4
    assert found["kedge_promotions_total", (("replica", "a"), ("tier", "host"))] == 1
    assert found["kedge_promotions_total", (("replica", "a"), ("tier", "disk"))] == 2
    assert found["kedge_disk_failures_total", (("replica", "a"),)] == 6
    assert found["kedge_disk_kv_bytes", (("replica", "a"),)] == 6144
    assert found["kedge_disk_kv_budget_bytes", (("replica", "a"),)] == 8192
    assert found["kedge_disk_sessions", (("replica", "a"),)] == 3
    assert found["kedge_host_kv_bytes", (("replica", "a"),)] == 1024
    assert found["kedge_host_kv_budget_bytes", (("replica", "a"),)] == 4096
    assert found["kedge_host_sessions", (("replica", "a"),)] == 1
    assert found["kedge_draft_tokens_total", (("replica", "a"),)] == 50
    assert found["kedge_accepted_draft_tokens_total", (("replica", "a"),)] == 30
    assert found["kedge_cached_tokens_total", (("replica", "a"),)] == 800
    assert found["kedge_turns_total", (("outcome", "committed"), ("replica", "a"))] == 1
    assert found["kedge_ttft_seconds_bucket", (("le", "0.005"), ("replica", "a"))] == 1
    assert found["kedge_inter_token_seconds_count", (("replica", "a"),)] == 4
    assert found["kedge_inter_token_seconds_bucket", (("le", "0.001"), ("replica", "a"))] == 4


def test_the_window_pool_has_books_of_its_own() -> None:
    window = PageAccounts(total=5, free=1, cached=0, protected=0, session=2, in_flight=1)
    found = samples(ReplicaMetrics("a", lambda: stats(window=window)).render())
    for pool in ("full", "window"):
        assert found["kedge_kv_pages", (("account", "leaked"), ("pool", pool), ("replica", "a"))] == 1
    assert found["kedge_kv_pool_pages", (("pool", "window"), ("replica", "a"))] == 5


def test_merged_page_has_every_family_once_and_every_sample() -> None:
    ingress = IngressMetrics("front")
    ingress.failed_over()
    parts = [ReplicaMetrics(name, stats).render() for name in ("a", "b")]
    parts.append(
        render_gauges([("kedge_controller_sessions_idle", "Idle.", 3.0), ("kedge_x_total", "X.", 2.0)])
    )
    parts.append(ingress.render())
    page = merge_expositions(parts)
    types = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    merged = samples(page)
    apart: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for part in parts:
        apart |= samples(part)
    assert merged == apart
    assert merged["kedge_failovers_total", (("ingress", "front"),)] == 1
    assert merged["kedge_x_total", ()] == 2


def test_nothing_to_merge() -> None:
    assert merge_expositions([]) == ""
    assert merge_expositions(["", ""]) == ""
