"""The router decides by pin alone, never raises and never returns nothing."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RequestRouter

from serving.front.router import PinnedRequestRouter
from serving.wire.routing_errors import ALL_REPLICAS, KnownReplicas, Loss, Members, ReplicaGone

UNLISTED_S = 30.0


@dataclass(frozen=True)
class StandInReplica:
    """As much of Serve's RunningReplica as the router reads. It says how many requests it has, unless it is `dead`."""

    name: str
    replica_id: Any = field(init=False)
    dead: bool = False
    max_ongoing_requests: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "replica_id", ReplicaID(self.name, DeploymentID("LLMReplica")))

    async def get_queue_len(self, *, deadline_s: float) -> int:
        assert deadline_s > 0
        if self.dead:
            raise ActorDiedError()
        return 0


def pending(pin: str, internal_id: str = "http-1") -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=internal_id, session_id=pin)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


@pytest.fixture
def router() -> PinnedRequestRouter:
    """A router without a cluster: only what choose_replicas uses."""
    bare: PinnedRequestRouter = object.__new__(PinnedRequestRouter)
    bare._pending_requests_by_id = {}
    bare._pending_requests_by_model_id = {}
    bare.initialize_state(UNLISTED_S)
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
    with pytest.raises(KnownReplicas) as answer:
        await request.future
    assert answer.value.members == Members(("a", "b", "c"))


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


@pytest.fixture
async def serving_router() -> PinnedRequestRouter:
    """Serve's own router underneath, on this event loop."""
    router = PinnedRequestRouter(
        deployment_id=DeploymentID("LLMReplica"),
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state(UNLISTED_S)
    return router


async def delivered_to(router: PinnedRequestRouter, pin: str) -> str:
    async with asyncio.timeout(5):
        replica = await router._choose_replica_for_request(pending(pin))
    name: str = replica.name
    return name


async def members(router: PinnedRequestRouter) -> Members:
    with pytest.raises(KnownReplicas) as answer:
        await delivered_to(router, ALL_REPLICAS)
    found: Members = answer.value.members
    return found


async def test_a_replica_that_is_listed_no_more_gets_the_calls_that_name_it_and_no_others(
    serving_router: PinnedRequestRouter,
) -> None:
    serving_router.update_replicas(REPLICAS)
    serving_router.update_replicas(REPLICAS[1:])
    assert await members(serving_router) == Members(("b", "c"), ("a",))
    assert await delivered_to(serving_router, "a") == "a"
    assert {await delivered_to(serving_router, "") for _ in range(50)} == {"b", "c"}
    serving_router.update_replicas(REPLICAS)
    assert await members(serving_router) == Members(("a", "b", "c"))


async def test_where_all_of_them_go_those_that_go_are_better_than_nobody(
    serving_router: PinnedRequestRouter,
) -> None:
    serving_router.update_replicas(REPLICAS[:1])
    serving_router.update_replicas([])
    assert await members(serving_router) == Members((), ("a",))
    assert await delivered_to(serving_router, "") == "a"


async def test_one_that_died_is_not_taken_for_one_that_goes(serving_router: PinnedRequestRouter) -> None:
    dead: Any = StandInReplica("d", dead=True)
    serving_router.update_replicas([*REPLICAS, dead])
    serving_router.update_replicas(REPLICAS)
    async with asyncio.timeout(5):
        while (await members(serving_router)).unlisted:
            await asyncio.sleep(0)
    with pytest.raises(ReplicaGone) as caught:
        await delivered_to(serving_router, "d")
    assert caught.value.loss is Loss.DIED


async def test_a_replica_that_this_router_never_listed_is_not_known_to_be_dead(
    serving_router: PinnedRequestRouter,
) -> None:
    serving_router.update_replicas(REPLICAS)
    with pytest.raises(ReplicaGone) as caught:
        await delivered_to(serving_router, "newcomer")
    assert caught.value.loss is Loss.UNKNOWN


async def test_one_that_stays_unlisted_for_too_long_is_forgotten(serving_router: PinnedRequestRouter) -> None:
    serving_router.initialize_state(0.01)
    serving_router.update_replicas(REPLICAS)
    serving_router.update_replicas(REPLICAS[1:])
    async with asyncio.timeout(5):
        while (await members(serving_router)).unlisted:
            await asyncio.sleep(0.005)
    with pytest.raises(ReplicaGone):
        await delivered_to(serving_router, "a")


async def test_one_that_is_listed_again_in_time_stays(serving_router: PinnedRequestRouter) -> None:
    serving_router.initialize_state(0.01)
    serving_router.update_replicas(REPLICAS)
    serving_router.update_replicas(REPLICAS[1:])
    serving_router.update_replicas(REPLICAS)
    await asyncio.sleep(0.03)
    assert set((await members(serving_router)).listed) == set("abc")


def test_what_is_overridden_still_exists_in_this_ray() -> None:
    """Some of the overridden or called members are not public: a new Ray version must not silently drop them."""
    for name in ("update_replicas", "on_replica_actor_died", "_probe_queue_lens", "initialize_state"):
        assert callable(getattr(RequestRouter, name))
    parameters = inspect.signature(RequestRouter._choose_replica_for_request).parameters
    assert list(parameters) == ["self", "pending_request", "is_retry"]
    assert isinstance(inspect.getattr_static(RequestRouter, "max_num_routing_tasks"), property)
    assert callable(RequestRouter._remove_pending_request_from_indices)
