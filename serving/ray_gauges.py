"""The replica's main gauges in Ray's own metrics, so that they show in Ray's dashboard.

Ray forgets a gauge that is not set for about 20 s: publish every 5 s.
"""

from __future__ import annotations

from ray.serve.metrics import Gauge

from engine.api import EngineStats
from serving.metrics import ENGINE_GAUGES, pages_by_account


class RayGauges:
    """Created inside a replica. The tag is not called "replica": Ray Serve adds one of that name."""

    def __init__(self, replica_id: str) -> None:
        tags = {"kedge_replica": replica_id}
        self._pages = Gauge("kedge_kv_pages", "Pages of KV by account.", ("kedge_replica", "account"))
        self._pages.set_default_tags(tags)
        self._figures = [
            (figure, Gauge(figure.name, figure.help, ("kedge_replica",))) for figure in ENGINE_GAUGES
        ]
        for _, gauge in self._figures:
            gauge.set_default_tags(tags)

    def publish(self, stats: EngineStats) -> None:
        for account, count in pages_by_account(stats.pages).items():
            self._pages.set(count, {"account": account})
        for figure, gauge in self._figures:
            gauge.set(figure.read(stats))
