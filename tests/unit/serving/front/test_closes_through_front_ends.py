"""A close finds the session's owner, whichever owner the asked ingress remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import StoreError
from serving.front import session_owners
from serving.front.ownership_cache import Owner, OwnershipCache
from serving.front.replica_gone import ReplicaLate
from serving.wire.calls import AnyCall, CloseSession
from tests.unit.serving.failover_rig import Failover, running_failover
from tests.unit.serving.local_replicas import LocalReplicas
from tests.unit.serving.local_service import LocalService
from tests.unit.serving.replica_rig import call


class ClosingReplicas(LocalReplicas):
    """`asked` are the replicas that were asked. The first `late` calls are not carried out in time, or just before
    they are too late (`done_late`). The first call finds the session as `on_the_way` leaves it."""

    def __init__(self, served: Failover) -> None:
        super().__init__(served.rigs)
        self.dead = served.replicas.dead
        self.asked: list[str] = []
        self.late = 0
        self.done_late = False
        self.on_the_way: Callable[[], object] = lambda: None

    async def call(self, replica_id: str, call: AnyCall, timeout_s: float | None = None) -> Any:
        assert isinstance(call, CloseSession)
        self.asked.append(replica_id)
        if len(self.asked) == 1:
            self.on_the_way()
        if replica_id not in self.dead and len(self.asked) <= self.late:
            if self.done_late:
                await super().call(replica_id, call, timeout_s)
            raise ReplicaLate
        return await super().call(replica_id, call, timeout_s)


class OtherIngress:
    """An ingress that remembers "a" as a session's owner at epoch 1, whoever owns it now."""

    def __init__(self, served: Failover, key: str = "s") -> None:
        self.replicas = ClosingReplicas(served)
        cache = OwnershipCache(9)
        cache.put(key, Owner("a", 1))
        self.client = LocalService(served.rigs[0], self.replicas, cache=cache, failover_timeout_s=5.0)


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


async def test_a_session_that_moved_is_closed_when_its_turn_has_ended(served: Failover) -> None:
    a, b = served.rigs
    epoch = move(served)
    await a.host.release("s")
    b.runner.hold()
    turn = asyncio.create_task(b.run(call([5], "s"), epoch))
    await b.begun()
    other = OtherIngress(served)
    assert await other.client.close_session("s", tenant="")
    assert other.replicas.asked == ["b"]
    b.runner.go_on()
    assert (await turn)[-1].finish is not None
    assert served.cluster.sessions() == []


async def test_a_session_that_moves_while_the_close_is_on_its_way_is_closed_at_its_new_owner(
    served: Failover,
) -> None:
    other = OtherIngress(served)
    other.replicas.on_the_way = lambda: move(served)
    assert await other.client.close_session("s", tenant="")
    assert other.replicas.asked == ["a", "b"]
    assert served.cluster.sessions() == []


async def test_a_session_that_is_opened_while_the_close_is_on_its_way_stays(served: Failover) -> None:
    other = OtherIngress(served)

    def is_closed_and_opened_again() -> None:
        served.cluster.close_session("s")
        served.cluster.open_session("s", "", None, None, "another")

    other.replicas.on_the_way = is_closed_and_opened_again
    assert await other.client.close_session("s", tenant="")
    assert [entry.open_key for entry in served.cluster.sessions()] == ["another"]
    served.cluster.close_session("s")


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
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)
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
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)
    other = OtherIngress(served)
    served.controller.log.away = True
    closing = asyncio.create_task(other.client.close_session("s", tenant=""))
    await asyncio.wait([closing], timeout=0.1)
    assert not closing.done()
    served.controller.log.away = False
    assert await closing
    assert served.cluster.sessions() == []


@pytest.fixture
def answer_is_lost(served: Failover, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The log's answer to its first close is lost. Returns the sessions that it was to close."""
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)
    closed: list[str] = []
    store: Any = served.controller.log
    close = store.close

    def close_without_an_answer(session_id: str) -> bool:
        there: bool = close(session_id)
        closed.append(session_id)
        if len(closed) == 1:
            raise StoreError("the answer is lost")
        return there

    monkeypatch.setattr(served.controller.log, "close", close_without_an_answer, raising=False)
    return closed


@pytest.mark.parametrize("idle_s", [0.0, 60.0])
async def test_a_close_whose_answer_from_the_log_is_lost_has_closed_the_session(
    served: Failover, answer_is_lost: list[str], monkeypatch: pytest.MonkeyPatch, idle_s: float
) -> None:
    """The front end's next try found no session, and the client was told 404."""
    clock = served.cluster._clock
    monkeypatch.setattr(
        served.cluster, "_clock", lambda: clock() + idle_s
    )  # a long idle one is looked up in the log
    other = OtherIngress(served)
    assert await other.client.close_session("s", tenant="")
    assert answer_is_lost
    assert served.cluster.sessions() == []
    assert not await other.client.close_session("s", tenant="")


async def test_a_close_whose_answer_from_the_log_is_lost_closes_a_session_without_an_owner(
    served: Failover, answer_is_lost: list[str]
) -> None:
    await served.rigs[0].host.release("s")
    served.replicas.dead.update("ab")
    for name in "ab":
        served.cluster.report_unreachable(name, True)
    assert await OtherIngress(served).client.close_session("s", tenant="")
    assert answer_is_lost


async def test_a_close_that_its_owner_answers_too_late_has_closed_the_session(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So was this."""
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)
    other = OtherIngress(served)
    other.replicas.late, other.replicas.done_late = 1, True
    assert await other.client.close_session("s", tenant="")
    assert served.cluster.sessions() == []
    assert not await other.client.close_session("s", tenant="")


async def test_no_session_is_told_as_closed_though_the_log_was_away(
    served: Failover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_owners, "LOG_PAUSE_S", 0.005)
    served.controller.failures["resolve"] = [StoreError("away")]
    client = OtherIngress(served).client
    assert not await client.close_session("unknown", tenant="")
    assert await client.close_session("s", tenant="")
