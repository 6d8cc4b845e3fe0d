"""An operator's drain reaches the replica that it names, or says why not."""

from __future__ import annotations

from typing import Any

import pytest

from serving.front.cluster_client import ClusterClient
from serving.wire.errors import error_info, unavailable
from serving.wire.routing_errors import Loss, ReplicaGone
from serving.wire.turns import ServiceError


class Replicas:
    """Replica "a", which answers a drain with `answer`; an exception is raised."""

    def __init__(self, answer: Any = None) -> None:
        self._answer = answer
        self.drained: list[str] = []

    async def present(self) -> tuple[str, ...]:
        return ("a",)

    async def call(self, replica_id: str, method: str) -> Any:
        assert method == "drain"
        if isinstance(self._answer, Exception):
            raise self._answer
        self.drained.append(replica_id)
        return self._answer


def client_of(replicas: Replicas) -> ClusterClient:
    unused: dict[str, Any] = dict.fromkeys(
        ("model", "siblings", "controller", "dispatcher", "metrics", "tasks")
    )
    parts: dict[str, Any] = {"replicas": replicas}
    return ClusterClient(settings={}, **parts, **unused)


async def test_it_reaches_the_replica() -> None:
    replicas = Replicas()
    await client_of(replicas).drain_replica("a")
    assert replicas.drained == ["a"]


async def test_an_unknown_replica_is_named() -> None:
    replicas = Replicas()
    with pytest.raises(ServiceError) as caught:
        await client_of(replicas).drain_replica("z")
    assert (caught.value.info.status, caught.value.info.code) == (404, "replica_not_found")
    assert replicas.drained == []


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (unavailable("nobody", "no_replica"), "no_replica"),
        (ReplicaGone("a", Loss.DIED), "replica_unavailable"),
    ],
)
async def test_what_the_replica_says_is_passed_on(answer: Any, code: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await client_of(Replicas(answer)).drain_replica("a")
    assert error_info(caught.value).code == code
