"""Metric definitions: what a replica and an ingress count, and how their expositions become one page.

Every process has a registry of its own; the ingress gathers the texts and `merge_expositions` groups them by family.
Engine figures are read from the engine's snapshot at scrape time, so that they cannot drift from the books.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache.audit import PageAccounts, PoolName
from engine.api import EngineStats

TTFT_BUCKETS_S = (0.005, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
INTER_TOKEN_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
PAGE_ACCOUNTS = ("free", "cached", "protected", "session", "in_flight", "leaked")


def pages_by_account(pages: PageAccounts) -> dict[str, int]:
    """The books of one pool as label → pages; all of them together make the pool."""
    return {account: getattr(pages, account) for account in PAGE_ACCOUNTS}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of EngineStats under its metric name."""

    name: str
    help: str
    read: Callable[[EngineStats], float]


ENGINE_GAUGES = (
    Figure("kedge_sessions", "Sessions with a slot in the engine.", lambda s: s.sessions),
    Figure("kedge_requests_running", "Requests in the running batch.", lambda s: s.running),
    Figure("kedge_requests_waiting", "Requests waiting for admission.", lambda s: s.waiting),
    Figure(
        "kedge_kv_utilization",
        "Share of the KV pool that turns take and lack; above 1 there is not enough for all.",
        lambda s: s.kv_utilization,
    ),
    Figure("kedge_host_kv_bytes", "Host memory that idle sessions' KV takes.", lambda s: s.host.used_bytes),
    Figure("kedge_host_kv_budget_bytes", "Host memory that it may take.", lambda s: s.host.budget_bytes),
    Figure("kedge_host_sessions", "Idle sessions whose KV is in host memory.", lambda s: s.host.sessions),
    Figure("kedge_disk_kv_bytes", "Disk that idle sessions' KV takes.", lambda s: s.disk.used_bytes),
    Figure("kedge_disk_kv_budget_bytes", "Disk that it may take.", lambda s: s.disk.budget_bytes),
    Figure("kedge_disk_sessions", "Idle sessions whose KV is on disk.", lambda s: s.disk.sessions),
)
ENGINE_COUNTERS = (
    Figure("kedge_engine_steps", "Steps of the engine.", lambda s: s.steps),
    Figure("kedge_retractions", "Running requests put back to wait for memory.", lambda s: s.retractions),
    Figure("kedge_disk_failures", "Writes and reads of KV on disk that failed.", lambda s: s.disk_failures),
    Figure("kedge_evicted_pages", "Cached pages dropped for memory.", lambda s: s.evicted_pages),
    Figure("kedge_generated_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    Figure("kedge_prefill_tokens", "Input tokens computed.", lambda s: s.prefill_tokens),
    Figure("kedge_cached_tokens", "Input tokens whose KV was there.", lambda s: s.cached_tokens),
    Figure("kedge_draft_tokens", "Tokens proposed ahead of the model.", lambda s: s.draft_tokens),
    Figure(
        "kedge_accepted_draft_tokens",
        "Proposed tokens that the model agreed with.",
        lambda s: s.accepted_draft_tokens,
    ),
)


def pools_of(stats: EngineStats) -> dict[PoolName, PageAccounts]:
    """The books of each pool that the engine has."""
    if stats.window_pages is None:
        return {"full": stats.pages}
    return {"full": stats.pages, "window": stats.window_pages}


class EngineCollector:
    """Turns the engine's snapshot into metric families, at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats], replica_id: str) -> None:
        self._stats = stats
        self._replica_id = replica_id

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._pages(stats)
        yield self._by_tier(
            "kedge_demotions",
            "Idle sessions whose KV gave way: to host memory, on to disk, or to the log alone.",
            host=stats.demotions_to_host,
            disk=stats.demotions_to_disk,
            log=stats.demotions_to_log,
        )
        yield self._by_tier(
            "kedge_promotions",
            "Idle sessions whose KV came back: from host memory, or from disk.",
            host=stats.promotions_from_host,
            disk=stats.promotions_from_disk,
        )
        for figure in ENGINE_GAUGES:
            gauge = GaugeMetricFamily(figure.name, figure.help, labels=["replica"])
            gauge.add_metric([self._replica_id], figure.read(stats))
            yield gauge
        for figure in ENGINE_COUNTERS:
            counter = CounterMetricFamily(figure.name, figure.help, labels=["replica"])
            counter.add_metric([self._replica_id], figure.read(stats))
            yield counter

    def _by_tier(self, name: str, text: str, **counts: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=["replica", "tier"])
        for tier, count in counts.items():
            family.add_metric([self._replica_id, tier], count)
        return family

    def _pages(self, stats: EngineStats) -> Iterator[Metric]:
        pages = GaugeMetricFamily(
            "kedge_kv_pages", "Pages of KV by account; leaked is 0.", labels=["replica", "pool", "account"]
        )
        totals = GaugeMetricFamily(
            "kedge_kv_pool_pages", "Pages of KV in the pool.", labels=["replica", "pool"]
        )
        for pool, accounts in pools_of(stats).items():
            totals.add_metric([self._replica_id, pool], accounts.total)
            for account, count in pages_by_account(accounts).items():
                pages.add_metric([self._replica_id, pool, account], count)
        yield pages
        yield totals


class ReplicaMetrics:
    """What one replica counts. Used on the replica's event loop only."""

    def __init__(self, replica_id: str, stats: Callable[[], EngineStats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats, replica_id))
        self._replica_id = replica_id
        labels = ["replica"]
        self._turns = Counter(
            "kedge_turns", "Turns by outcome.", [*labels, "outcome"], registry=self._registry
        )
        self._commits_pending = Gauge(
            "kedge_commits_pending",
            "Finished turns that wait for the session log.",
            labels,
            registry=self._registry,
        ).labels(replica_id)
        self._commit_retries = Counter(
            "kedge_commit_retries",
            "Commits told to the session log again, because it or its controller did not answer.",
            labels,
            registry=self._registry,
        ).labels(replica_id)
        self._ttft = Histogram(
            "kedge_ttft_seconds",
            "Arrival at the replica to first token.",
            labels,
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        ).labels(replica_id)
        self._inter_token = Histogram(
            "kedge_inter_token_seconds",
            "Time between tokens of one request.",
            labels,
            buckets=INTER_TOKEN_BUCKETS_S,
            registry=self._registry,
        ).labels(replica_id)

    def commit_pending(self) -> AbstractContextManager[None]:
        """Around what commits a turn, from the first try to the last."""
        return self._commits_pending.track_inprogress()

    def commit_retried(self) -> None:
        self._commit_retries.inc()

    def turn_ended(self, outcome: str) -> None:
        """`outcome`: committed, replayed, aborted, refused (the client's fault), overloaded (no room), unavailable (the
        engine or the log does not answer), moved, stale, store_failed or error (a fault of ours)."""
        self._turns.labels(self._replica_id, outcome).inc()

    def first_token(self, after_s: float) -> None:
        self._ttft.observe(after_s)

    def next_tokens(self, count: int, after_s: float) -> None:
        """`count` tokens that arrived together, `after_s` after the ones before."""
        for _ in range(count):
            self._inter_token.observe(after_s / count)

    def render(self) -> str:
        return generate_latest(self._registry).decode()


class IngressMetrics:
    """What one HTTP front end counts."""

    def __init__(self, ingress_id: str) -> None:
        self.ingress_id = ingress_id
        self._registry = CollectorRegistry()
        self._failovers = Counter(
            "kedge_failovers",
            "Calls sent again because their owner was lost.",
            ["ingress"],
            registry=self._registry,
        ).labels(ingress_id)
        self._takeovers = Counter(
            "kedge_takeovers",
            "Turns that went on at another replica in mid-stream.",
            ["ingress"],
            registry=self._registry,
        ).labels(ingress_id)
        self._connection_breaks = Counter(
            "kedge_connection_breaks",
            "Times that the stream of events from a replica broke, and was to be opened again.",
            ["ingress"],
            registry=self._registry,
        ).labels(ingress_id)
        self._resolves = Counter(
            "kedge_ownership_lookups",
            "Turns whose owner the controller was asked for, rather than found in the cache.",
            ["ingress"],
            registry=self._registry,
        ).labels(ingress_id)

    def failed_over(self) -> None:
        self._failovers.inc()

    def taken_over(self) -> None:
        self._takeovers.inc()

    def connection_broke(self) -> None:
        self._connection_breaks.inc()

    def looked_up(self) -> None:
        self._resolves.inc()

    def render(self) -> str:
        return generate_latest(self._registry).decode()


def render_gauges(figures: Iterable[tuple[str, str, float]]) -> str:
    """Exposition text of unlabelled gauges given as (name, help, value); names in `_total` become counters."""
    registry = CollectorRegistry()

    class Figures:
        def collect(self) -> Iterator[Metric]:
            for name, text, value in figures:
                counts = name.endswith("_total")
                family = CounterMetricFamily if counts else GaugeMetricFamily
                yield family(name.removesuffix("_total"), text, value=value)

    registry.register(Figures())
    return generate_latest(registry).decode()


def merge_expositions(texts: Iterable[str]) -> str:
    """One exposition out of several: every family once, with the samples of all."""
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        family = ""
        for line in text.splitlines():
            if line.startswith("# HELP ") or line.startswith("# TYPE "):
                family = line.split(" ", 3)[2]
                lines = headers.setdefault(family, [])
                if not any(line[:7] == seen[:7] for seen in lines):
                    lines.append(line)
            elif line and not line.startswith("#"):
                samples.setdefault(family, []).append(line)
    blocks = ["\n".join([*headers.get(name, []), *lines]) for name, lines in samples.items()]
    return "\n".join(blocks) + "\n" if blocks else ""
