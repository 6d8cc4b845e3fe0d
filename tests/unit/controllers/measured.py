"""The controller's figures, for tests."""

from __future__ import annotations

from controllers.cluster import Cluster


def measured(cluster: Cluster, name: str, **labels: str) -> float:
    """The value of the figure of this name that has these labels among its own. For a histogram, how many values it
    has."""
    (found,) = (
        each
        for each in cluster.measures()
        if each.name == name and labels.items() <= dict(each.labels).items()
    )
    return float(sum(found.counts)) if found.counts else found.value
