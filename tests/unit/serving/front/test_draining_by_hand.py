"""An operator's drain reaches the replica that it names, or the reply says why not."""

from __future__ import annotations

from typing import Any

import pytest

from serving.front.cluster_client import ClusterClient
from serving.front.replica_gone import Loss, ReplicaGone
from serving.wire.calls import AnyCall, Drain
from serving.wire.errors import error_info, unavailable
from serving.wire.turns import ServiceError


class Replicas:
    """A cluster with replica "a". Its answer to a drain may be an exception."""

    def __init__(self, answer: Exception | None = None) -> None:
        self._answer = answer
        self.drained: list[str] = []

    async def present(self) -> tuple[str, ...]:
        return ("a",)

    async def call(self, replica_id: str, call: AnyCall) -> None:
        assert isinstance(call, Drain)
        if self._answer is not None:
            raise self._answer
        self.drained.append(replica_id)


def client_of(replicas: Replicas) -> ClusterClient:
    unused: dict[str, Any] = dict.fromkeys(
        ("model", "siblings", "controller", "dispatcher", "conversations", "metrics", "tasks")
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
        (ServiceError(unavailable("nobody", "no_replica")), "no_replica"),
        (ReplicaGone("a", Loss.DIED), "replica_unavailable"),
    ],
)
async def test_what_the_replica_says_is_passed_on(answer: Any, code: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await client_of(Replicas(answer)).drain_replica("a")
    assert error_info(caught.value).code == code
