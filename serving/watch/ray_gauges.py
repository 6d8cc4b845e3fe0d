"""The replica's main gauges in Ray's own metrics, so that they show in Ray's dashboard.

Ray forgets a gauge that is not set for about 20 s: publish every 5 s. Ray Serve adds the tag "replica" by itself.
"""

from __future__ import annotations

from ray.serve.metrics import Gauge

from engine.api import EngineStats
from serving.watch.metrics import ENGINE_GAUGES, pages_by_account, pools_of


class RayGauges:
    """To be created inside a replica."""

    def __init__(self) -> None:
        self._pages = Gauge("kedge_kv_pages", "Pages of KV by account.", ("pool", "account"))
        self._pool_pages = Gauge("kedge_kv_pool_pages", "Pages of KV in the pool.", ("pool",))
        self._figures = [(figure, Gauge(figure.name, figure.help)) for figure in ENGINE_GAUGES]

    def publish(self, stats: EngineStats) -> None:
        for pool, accounts in pools_of(stats).items():
            self._pool_pages.set(accounts.total, {"pool": pool})
            for account, count in pages_by_account(accounts).items():
                self._pages.set(count, {"pool": pool, "account": account})
        for figure, gauge in self._figures:
            gauge.set(figure.read(stats))
