"""What a front end says of the model follows the replicas, whichever it asked when it started."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from serving.front.cluster_client import ClusterClient
from serving.front.replica_gone import ReplicaGone
from serving.wire.calls import AnyCall, GetModelInfo
from serving.wire.turns import ModelInfo, SamplingDefaults
from tests.unit.serving.local_service import MODEL

FORMER = replace(MODEL, model_id="own", aliases=("chat",), adapters={"a": "org/a"}, reasoning="think")
NEW = replace(
    MODEL,
    model_id="a replica's",
    max_context_len=2 * MODEL.max_context_len,
    created=MODEL.created + 60,
    sampling=SamplingDefaults(temperature=0.6),
)


class UpdatedReplicas:
    """ReplicaCalls of a cluster whose replicas have been replaced since the front end asked."""

    gone = False

    async def call(self, _replica_id: str, call: AnyCall) -> ModelInfo:
        assert isinstance(call, GetModelInfo)
        if self.gone:
            raise ReplicaGone("a")
        return NEW


async def test_a_front_end_that_asked_a_former_replica_learns_of_the_new_model() -> None:
    """It kept the former model's context, sampling defaults and formats of thoughts and calls as long as it ran."""
    replicas = UpdatedReplicas()
    unused: dict[str, Any] = dict.fromkeys(
        ("siblings", "controller", "owners", "dispatcher", "places", "metrics", "tasks")
    )
    parts: dict[str, Any] = {"replicas": replicas}
    client = ClusterClient(model=FORMER, settings={}, **parts, **unused)
    replicas.gone = True
    await client.learn_model()
    assert client.model == FORMER
    replicas.gone = False
    await client.learn_model()
    own = {"model_id": "own", "aliases": ("chat",), "adapters": {"a": "org/a"}, "created": FORMER.created}
    assert client.model == replace(NEW, **own)
