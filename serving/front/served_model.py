"""Which model is served, and under which names: what the replica that started last says."""

from __future__ import annotations

from serving.front.replica_calls import ReplicaCalls
from serving.wire.calls import GetModelInfo
from serving.wire.turns import ModelInfo


async def served_model(replicas: ReplicaCalls, timeout_s: float) -> ModelInfo | None:
    """None if no replica answers in time. During an update they differ, and the newest has the newest settings. A front
    end has these sooner. But the names in them are true only once a replica serves what they name."""
    told: list[ModelInfo] = await replicas.broadcast(GetModelInfo(), timeout_s)
    return max(told, key=lambda model: model.created, default=None)
