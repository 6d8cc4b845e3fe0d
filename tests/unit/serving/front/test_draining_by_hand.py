"""An operator's drain reaches the replica that it names, or the reply says why not."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.records import ReplicaStatus
from serving.front.cluster_client import ClusterClient
from serving.front.replica_calls import ReplicaCalls
from serving.front.replica_gone import Loss, ReplicaGone
from serving.replica.link_server import Emit
from serving.wire.calls import AnyCall, Drain, answer_of
from serving.wire.errors import error_info, unavailable
from serving.wire.turns import ServiceError
from tests.unit.serving.link_rig import running_link


class Replicas:
    """ReplicaCalls of a cluster with replica "a". Its answer to a drain may be an exception."""

    def __init__(self, answer: Exception | None = None) -> None:
        self._answer = answer
        self.drained: list[str] = []

    async def call(self, replica_id: str, call: AnyCall) -> None:
        assert isinstance(call, Drain)
        if self._answer is not None:
            raise self._answer
        self.drained.append(replica_id)


def client_of(replicas: Replicas | ReplicaCalls) -> ClusterClient:
    unused: dict[str, Any] = dict.fromkeys(
        ("model", "siblings", "controller", "owners", "dispatcher", "places", "metrics", "tasks")
    )
    parts: dict[str, Any] = {"replicas": replicas}
    return ClusterClient(settings={}, **parts, **unused)


async def not_called(call: AnyCall, _emit: Emit) -> None:
    raise AssertionError(f"{call} came to another replica")


async def test_it_reaches_the_replica() -> None:
    replicas = Replicas()
    await client_of(replicas).drain_replica("a")
    assert replicas.drained == ["a"]


async def test_one_that_has_just_come_is_drained() -> None:
    """Front ends ask who is there once a second. Until then, a drain was refused: there is no such replica."""
    drained: list[AnyCall] = []

    async def serve(call: AnyCall, emit: Emit) -> None:
        drained.append(call)
        emit(answer_of(None))

    async with running_link(serve) as rig:
        newcomer = rig.listed
        rig.listed = [ReplicaStatus("earlier", 100, 100)]
        await rig.calls.look()
        rig.listed = rig.listed + newcomer
        await client_of(rig.calls).drain_replica("r")
    assert drained == [Drain()]


async def test_an_unknown_replica_is_named() -> None:
    async with running_link(not_called) as rig:
        with pytest.raises(ServiceError) as caught:
            await client_of(rig.calls).drain_replica("z")
    assert (caught.value.info.status, caught.value.info.code) == (404, "replica_not_found")


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
