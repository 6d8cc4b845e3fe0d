"""What an ingress's router lists reaches the controller, whoever of the replicas does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serving.background import BackgroundTasks
from serving.front.membership import Membership
from serving.front.ownership_cache import Owner, OwnershipCache
from serving.wire.routing_errors import Members


class Cluster:
    """A router, replicas that do not answer, and a controller. `told` is what it heard."""

    def __init__(self) -> None:
        self.members_now = Members(("a", "b", "c"), ())
        self.told: list[tuple[str, ...]] = []
        self.hastened: list[str] = []

    async def members(self) -> Members:
        return self.members_now

    async def call(self, replica_id: str, method: str, **_: float) -> None:
        assert method == "heartbeat"
        self.hastened.append(replica_id)
        await asyncio.sleep(60.0)

    async def report_members(self, _: str, listed: Any, unlisted: Any) -> list[str]:
        self.told.append((*listed, "|", *unlisted))
        return []


@pytest.mark.parametrize("times", [1, 2])
async def test_a_look_does_not_wait_for_a_replica_that_leaves(times: int) -> None:
    """One that could not be reached kept the news of the next from the controller for half a second (simulated seed
    74190 of 10 turns)."""
    cluster, owners, tasks = Cluster(), OwnershipCache(9), BackgroundTasks()
    parts: Any = (cluster, cluster)
    membership = Membership("i", *parts, owners, tasks)
    await membership.look()
    owners.put("s", Owner("a", 1))
    for leaving in ("a", "b")[:times]:
        now = cluster.members_now
        cluster.members_now = Members(tuple(set(now.listed) - {leaving}), (*now.unlisted, leaving))
        async with asyncio.timeout(1.0):
            await membership.look()
        await asyncio.sleep(0)
        assert cluster.told[-1][-1] == leaving
    assert cluster.hastened == ["a", "b"][:times]
    assert owners.get("s") is None
    await tasks.stop(0.01)
