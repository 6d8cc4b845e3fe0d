"""A close finds the session's owner, whichever owner the asked ingress remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serving.front import turn_dispatch
from serving.front.ownership_cache import Owner, OwnershipCache
from serving.front.replica_gone import ReplicaLate
from serving.wire.calls import AnyCall, CloseSession
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.local_replicas import LocalReplicas
from tests.unit.serving.local_service import LocalService
from tests.unit.serving.replica_rig import call


class ClosingReplicas(LocalReplicas):
    """`asked` are the replicas that were asked. The first `late` calls are not carried out in time."""

    def __init__(self, served: Failover) -> None:
        super().__init__(served.rigs)
        self.dead = served.replicas.dead
        self.asked: list[str] = []
        self.late = 0

    async def call(self, replica_id: str, call: AnyCall, timeout_s: float | None = None) -> Any:
        assert isinstance(call, CloseSession)
        self.asked.append(replica_id)
        if replica_id not in self.dead and len(self.asked) <= self.late:
            raise ReplicaLate
        return await super().call(replica_id, call, timeout_s)


class OtherIngress:
    """An ingress that remembers "a" as a session's owner at epoch 1, whoever owns it now."""

    def __init__(self, served: Failover, key: str = "s") -> None:
        self.replicas = ClosingReplicas(served)
        owners = OwnershipCache(9)
        owners.put(key, Owner("a", 1))
        self.client = LocalService(served.rigs[0], self.replicas, owners=owners, failover_timeout_s=5.0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Failover]:
    async with running_failover(tmp_path) as failover:
        for rig in failover.rigs:
            rig.runner.step_s = 0.0
        failover.open_session("s")
        await failover.turn(call([4], "s"))
        yield failover
        for rig in failover.rigs:
            await rig.books_are_empty()


def move(served: Failover) -> int:
    """Moves the session to "b". Returns the new epoch."""
    served.cluster.report_unreachable("a", True)
    return served.cluster.resolve("s", False, "").epoch


@pytest.mark.parametrize("still_held", [False, True])
async def test_a_session_that_moved_is_closed_when_its_turn_has_ended(
    served: Failover, still_held: bool
) -> None:
    a, b = served.rigs
    epoch = move(served)
    if not still_held:
        await a.host.release("s")
    b.runner.hold()
    turn = asyncio.create_task(b.run(call([5], "s"), epoch))
    await b.begun()
    other = OtherIngress(served)
    assert await other.client.close_session("s", tenant="")
    assert other.replicas.asked == ["a", "b"]
    b.runner.go_on()
    assert (await turn)[-1].finish is not None
    assert served.cluster.sessions() == []


async def test_a_session_whose_owner_has_not_loaded_it_is_closed_in_the_log(served: Failover) -> None:
    await served.rigs[0].host.release("s")
    other = OtherIngress(served)
    assert await other.client.close_session("s", tenant="")
    assert other.replicas.asked == ["a"]
    assert served.cluster.sessions() == []
    assert not await other.client.close_session("s", tenant="")


async def test_a_close_that_comes_twice_closes_no_later_session(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy used to close a later session of the same name (simulated seed 1000236 of 1,000 turns)."""
    await served.rigs[0].host.release("s")
    asked: list[tuple[Any, ...]] = []
    close = served.cluster.close_session

    def noted(*args: Any) -> bool:
        asked.append(args)
        return close(*args)

    monkeypatch.setattr(served.cluster, "close_session", noted)
    assert await OtherIngress(served).client.close_session("s", tenant="")
    served.cluster.open_session("s", "", None, None, "another")
    assert not close(*asked[0])
    assert [entry.open_key for entry in served.cluster.sessions()] == ["another"]
    close("s")


async def test_a_close_that_reaches_a_replica_twice_closes_no_later_session(served: Failover) -> None:
    """The replica used to close whichever session it held by that name."""
    assert await served.rigs[0].host.close("s", 1)
    served.open_session("s")
    await served.turn(call([4], "s"))
    (entry,) = served.cluster.sessions()
    (owner,) = (rig for rig in served.rigs if rig.replica_id == entry.replica_id)
    assert not await owner.host.close("s", 1)
    assert await owner.host.close("s", entry.epoch)


async def test_an_id_that_was_a_tenants_closes_no_session_of_another(served: Failover) -> None:
    """A front end remembered the owner of an expired session. The tenant's close went to that replica and used to close
    the session that another tenant had opened under the same id."""
    served.cluster.open_session("s", "acme", None, None)
    await served.turn(call([4], "acme s"))
    other = OtherIngress(served, "other s")
    assert not await other.client.close_session("s", tenant="other")
    assert {entry.session_id for entry in served.cluster.sessions()} == {"s", "acme s"}
    assert await other.client.close_session("s", tenant="acme")
    assert await other.client.close_session("s", tenant="")


async def test_a_session_without_an_owner_is_closed_in_the_log(served: Failover) -> None:
    await served.rigs[0].host.release("s")
    served.replicas.dead.update("ab")
    for name in "ab":
        served.cluster.report_unreachable(name, True)
    client = OtherIngress(served).client
    assert await client.close_session("s", tenant="")
    assert served.cluster.sessions() == []


async def test_a_close_asks_an_owner_that_was_late_again(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the owner knows whether a turn is in flight. The session used to be closed without it."""
    monkeypatch.setattr(turn_dispatch, "LOG_PAUSE_S", 0.005)
    a, other = served.rigs[0], OtherIngress(served)
    other.replicas.late = 2
    a.runner.hold()
    turn = asyncio.create_task(a.run(call([5], "s"), 1))
    await a.begun()
    assert await other.client.close_session("s", tenant="")
    assert other.replicas.asked == ["a"] * 3
    a.runner.go_on()
    assert (await turn)[-1].finish is not None
    assert served.cluster.sessions() == []


async def test_a_close_waits_for_the_log(served: Failover, monkeypatch: pytest.MonkeyPatch) -> None:
    """The close used to end in store_unavailable. The replica had already forgotten the session, but the log kept
    it."""
    monkeypatch.setattr(turn_dispatch, "LOG_PAUSE_S", 0.005)
    other = OtherIngress(served)
    served.controller.log.away = True
    closing = asyncio.create_task(other.client.close_session("s", tenant=""))
    await asyncio.wait([closing], timeout=0.1)
    assert not closing.done()
    served.controller.log.away = False
    assert await closing
    assert served.cluster.sessions() == []
