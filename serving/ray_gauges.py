"""The replica's main gauges in Ray's own metrics, so that they show in Ray's dashboard.

Ray forgets a gauge that is not set for about 20 s: publish every 5 s. Ray Serve adds the tag "replica" by itself.
"""

from __future__ import annotations

from ray.serve.metrics import Gauge

from engine.api import EngineStats
from serving.metrics import ENGINE_GAUGES, pages_by_account


class RayGauges:
    """To be created inside a replica."""

    def __init__(self) -> None:
        self._pages = Gauge("kedge_kv_pages", "Pages of KV by account.", ("account",))
        self._figures = [(figure, Gauge(figure.name, figure.help)) for figure in ENGINE_GAUGES]

    def publish(self, stats: EngineStats) -> None:
        for account, count in pages_by_account(stats.pages).items():
            self._pages.set(count, {"account": account})
        for figure, gauge in self._figures:
            gauge.set(figure.read(stats))
