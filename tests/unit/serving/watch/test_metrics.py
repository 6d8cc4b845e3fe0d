"""What replicas and front ends count; the engine's books appear by account."""

from __future__ import annotations

from cache.audit import AuditReport, Finding, PageAccounts, TierAccounts
from serving.watch.engine_figures import pages_by_account
from serving.watch.metrics import OUTCOMES, EndedTurn, FailoverCause, IngressMetrics, ReplicaMetrics
from tests.unit.serving.engine_figures import stats
from tests.unit.serving.metric_samples import samples


def test_accounts_make_up_the_pool() -> None:
    pages = stats(in_flight=3).pages
    assert sum(pages_by_account(pages).values()) == pages.total
    assert pages_by_account(pages)["leaked"] == -2


def test_replica_page() -> None:
    metrics = ReplicaMetrics("a", stats)
    metrics.turn_ended("committed")
    metrics.first_token(0.004, queue_s=0.0, prefill_s=0.004)
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
    assert sum(found["kedge_turns_total", (("outcome", each), ("replica", "a"))] for each in OUTCOMES) == 1
    assert found["kedge_ttft_seconds_bucket", (("le", "0.005"), ("replica", "a"))] == 1
    assert found["kedge_inter_token_seconds_count", (("replica", "a"),)] == 4
    assert found["kedge_inter_token_seconds_bucket", (("le", "0.001"), ("replica", "a"))] == 4


def test_the_window_pool_has_books_of_its_own() -> None:
    window = PageAccounts(total=5, free=1, cached=0, protected=0, session=2, in_flight=1)
    found = samples(ReplicaMetrics("a", lambda: stats(window=window)).render())
    for pool in ("full", "window"):
        assert found["kedge_kv_pages", (("account", "leaked"), ("pool", pool), ("replica", "a"))] == 1
    assert found["kedge_kv_pool_pages", (("pool", "window"), ("replica", "a"))] == 5
    assert found["kedge_evicted_pages_total", (("pool", "full"), ("replica", "a"))] == 7
    assert found["kedge_evicted_pages_total", (("pool", "window"), ("replica", "a"))] == 5


def test_a_turns_times_and_tokens() -> None:
    told: list[EndedTurn] = []
    metrics = ReplicaMetrics("a", stats, turn_ended=told.append)
    metrics.first_token(0.5, queue_s=0.3, prefill_s=0.15)
    ended = EndedTurn("stop", 100, 60, 8, turn_s=1.2, queue_s=0.3, decode_s=0.7)
    metrics.computed(ended)
    metrics.conversation("unnamed", ended, recognized=True)
    found = samples(metrics.render())
    replica = (("replica", "a"),)
    assert found["kedge_queue_seconds_sum", replica] == 0.3
    assert found["kedge_prefill_seconds_sum", replica] == 0.15
    assert found["kedge_decode_seconds_sum", replica] == 0.7
    assert found["kedge_turn_seconds_sum", replica] == 1.2
    assert found["kedge_prompt_tokens_sum", replica] == 100
    assert found["kedge_output_tokens_sum", replica] == 8
    assert found["kedge_finished_turns_total", (("reason", "stop"), *replica)] == 1
    assert found["kedge_conversation_cached_tokens_total", (("kind", "unnamed"), *replica)] == 60
    recognized = (("kind", "unnamed"), ("outcome", "recognized"), *replica)
    assert found["kedge_conversations_total", recognized] == 1
    assert told == [ended]


def test_a_turn_that_said_nothing_has_no_decode() -> None:
    metrics = ReplicaMetrics("a", stats)
    metrics.computed(EndedTurn("abort", 5, 0, 0, turn_s=0.1, queue_s=0.1, decode_s=None))
    assert samples(metrics.render())["kedge_decode_seconds_count", (("replica", "a"),)] == 0


def test_audits() -> None:
    metrics = ReplicaMetrics("a", stats)
    tier, finding = TierAccounts(0, 0, 0), Finding("leaked", "full", 7, (), None)
    metrics.audited(AuditReport({}, tier, tier, (finding,), ("free: 2, not 3",)), 1_700_000_000.0)
    metrics.audited(None, 1_700_000_060.0)
    found, replica = samples(metrics.render()), (("replica", "a"),)
    assert found["kedge_audits_total", (*replica, ("result", "findings"))] == 1
    assert found["kedge_audits_total", (*replica, ("result", "failed"))] == 1
    assert found["kedge_audits_total", (*replica, ("result", "clean"))] == 0
    assert found["kedge_audit_findings", replica] == 2
    assert found["kedge_audit_timestamp_seconds", replica] == 1_700_000_000.0


def test_front_end() -> None:
    metrics = IngressMetrics("f", {"cluster": "kedge"})
    metrics.failed_over(FailoverCause.LOST)
    metrics.taken_over(0.3)
    metrics.found_moved(0.02)
    metrics.request_begins()
    metrics.request_begins()
    metrics.request_ended("/v1/models", "GET", "2xx")
    found, own = samples(metrics.render()), (("cluster", "kedge"), ("ingress", "f"))
    assert found["kedge_takeovers_total", own] == 1
    by_cause = {cause: found["kedge_failovers_total", (("cause", cause), *own)] for cause in FailoverCause}
    assert by_cause == {FailoverCause.LOST: 1, FailoverCause.REFUSED: 0}
    assert found["kedge_takeover_seconds_sum", own] == 0.3
    assert found["kedge_move_seconds_sum", own] == 0.02
    assert found["kedge_http_requests_in_flight", own] == 1
    one = (*own, ("method", "GET"), ("route", "/v1/models"), ("status", "2xx"))
    assert found["kedge_http_requests_total", one] == 1


def test_nothing_tells_when_counters_were_made() -> None:
    assert "_created" not in ReplicaMetrics("a", stats).render() + IngressMetrics("f").render()
