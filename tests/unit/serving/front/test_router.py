"""The router decides by pin alone, never raises and never returns nothing."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

from serving.front.router import PinnedRequestRouter
from serving.wire.routing_errors import ALL_REPLICAS, ReplicaGone, RunningReplicas


@dataclass(frozen=True)
class StandInReplica:
    """As much of Serve's RunningReplica as the router reads."""

    name: str
    replica_id: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replica_id", SimpleNamespace(unique_id=self.name))


def pending(pin: str, internal_id: str = "http-1") -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=internal_id, session_id=pin)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


@pytest.fixture
def router() -> PinnedRequestRouter:
    """A router without a cluster: only what choose_replicas uses."""
    bare: PinnedRequestRouter = object.__new__(PinnedRequestRouter)
    bare._pending_requests_by_id = {}
    bare._pending_requests_by_model_id = {}
    return bare


REPLICAS: list[Any] = [StandInReplica(name) for name in "abc"]


async def test_pinned_call_goes_to_its_replica(router: PinnedRequestRouter) -> None:
    for replica in REPLICAS:
        for _ in range(20):
            request = pending(replica.name)
            assert await router.choose_replicas(REPLICAS, request) == [[replica]]
            assert request.routing_context.should_backoff
            assert not request.future.done()


async def test_gone_replica_fails_the_call_and_never_spills(router: PinnedRequestRouter) -> None:
    request = pending("z")
    router._pending_requests_by_id["http-1"] = request
    ranked = await router.choose_replicas(REPLICAS, request)
    assert any(ranked), "an empty answer would make Serve spin"
    with pytest.raises(ReplicaGone) as caught:
        await request.future
    assert caught.value.replica_id == "z"
    assert router._pending_requests_by_id == {}, "Serve does not forget a call whose future fails"


async def test_gone_replica_of_a_cancelled_call(router: PinnedRequestRouter) -> None:
    request = pending("z")
    request.future.cancel()
    assert any(await router.choose_replicas(REPLICAS, request))


async def test_who_runs_is_answered_and_not_delivered(router: PinnedRequestRouter) -> None:
    request = pending(ALL_REPLICAS)
    assert any(await router.choose_replicas(REPLICAS, request))
    with pytest.raises(RunningReplicas) as answer:
        await request.future
    assert answer.value.replica_ids == ("a", "b", "c")


async def test_call_without_a_pin_gets_two_to_choose_from(router: PinnedRequestRouter) -> None:
    chosen = set()
    for _ in range(200):
        (rank,) = await router.choose_replicas(REPLICAS, pending(""))
        assert len(rank) == 2
        chosen.update(replica.name for replica in rank)
    assert chosen == set("abc")
    assert await router.choose_replicas(REPLICAS[:1], pending("")) == [REPLICAS[:1]]


async def test_calls_of_one_http_request_get_ids_of_their_own(
    router: PinnedRequestRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def chosen(_self: Any, request: PendingRequest, **_options: bool) -> str:
        return request.metadata.internal_request_id

    monkeypatch.setattr(RequestRouter, "_choose_replica_for_request", chosen)
    original = pending("a")
    ids = await asyncio.gather(
        router._choose_replica_for_request(original), router._choose_replica_for_request(pending("a"))
    )
    assert len(set(ids)) == 2
    again = await router._choose_replica_for_request(original, is_retry=True)
    assert again == ids[0]


def test_what_is_overridden_still_exists_in_this_ray() -> None:
    """Two of the overridden members are not public: a new Ray version must not silently drop them."""
    parameters = inspect.signature(RequestRouter._choose_replica_for_request).parameters
    assert list(parameters) == ["self", "pending_request", "is_retry"]
    assert isinstance(inspect.getattr_static(RequestRouter, "max_num_routing_tasks"), property)
    assert callable(RequestRouter._remove_pending_request_from_indices)
