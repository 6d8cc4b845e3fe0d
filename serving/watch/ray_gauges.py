"""The replica's main gauges in Ray's own metrics, so that they show in Ray's dashboard.

Ray forgets a gauge that is not set for about 20 s, so publish every 5 s. Ray Serve adds the tag "replica" itself.
"""

from __future__ import annotations

from ray.serve.metrics import Gauge

from engine.api import EngineStats
from serving.watch.definitions import DEFINITIONS
from serving.watch.engine_figures import engine_figures
from serving.watch.metric_definition import Kind


class RayGauges:
    """Create it inside a replica."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def publish(self, stats: EngineStats) -> None:
        for figure in engine_figures(stats):
            known = DEFINITIONS[figure.name]
            if known.kind is not Kind.GAUGE:
                continue
            labels = known.labels[1:]
            gauge = self._gauges.get(figure.name)
            if gauge is None:
                gauge = self._gauges[figure.name] = Gauge(figure.name, known.help, labels)
            gauge.set(figure.value, dict(zip(labels, figure.labels, strict=True)))
