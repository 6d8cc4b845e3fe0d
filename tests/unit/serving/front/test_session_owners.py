"""Calls find the owner of their session. An outdated memory, a lost replica or a moved session costs a round, not an
error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controllers.errors import NoReplica, SessionNotFound
from controllers.records import Assignment
from serving.front import session_owners
from serving.front.known_places import KnownPlaces
from serving.front.ownership_cache import OwnershipCache
from serving.front.replica_gone import ReplicaGone
from serving.front.session_owners import SessionOwners
from serving.watch.metrics import FailoverCause, IngressMetrics
from serving.wire.calls import CloseSession
from serving.wire.errors import error_info, unavailable
from serving.wire.turns import ErrorInfo, ServiceError
from tests.unit.serving.failover_rig import failovers

MOVED = ErrorInfo(409, "stale_epoch", "moved")
BUSY = ErrorInfo(409, "turn_in_flight", "busy")
NOT_HELD = ErrorInfo(404, "session_not_found", "not held here")


class Replicas:
    """Gives these answers in order. An answer that is an exception is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, ...]] = []

    async def call(self, replica_id: str, call: Any) -> Any:
        self.asked.append((replica_id, call))
        answer = self.answers.pop(0)
        if isinstance(answer, ErrorInfo):
            raise ServiceError(answer)
        if isinstance(answer, Exception):
            raise answer
        return answer


def work_at(epoch: int) -> CloseSession:
    return CloseSession("t s", epoch)


class Controller:
    """Names a new owner, at a new epoch, each time that it is asked."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.epoch = 0
        self.lost: list[str] = []

    async def resolve(self, session_id: str, create: bool, tenant: str, *wishes: Any) -> Assignment:
        assert not create
        assert wishes == (None, None)
        if self.failures:
            raise self.failures.pop(0)
        self.epoch += 1
        return Assignment(session_id, f"{tenant}{self.epoch}", self.epoch, False)

    async def report_unreachable(self, replica_id: str, died: bool) -> bool:
        self.lost.append(replica_id)
        return died


def owners(
    replicas: Replicas,
    controller: Controller,
    timeout_s: float = 5.0,
    metrics: IngressMetrics | None = None,
) -> SessionOwners:
    parts: tuple[Any, ...] = (replicas, controller, OwnershipCache(9), KnownPlaces(9))
    return SessionOwners(*parts, metrics or IngressMetrics("i"), failover_timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.001)


async def test_the_owner_is_remembered() -> None:
    replicas, controller = Replicas(1, 2), Controller()
    ask = owners(replicas, controller).ask
    assert [await ask("t s", work_at) for _ in range(2)] == [1, 2]
    assert replicas.asked == [("t1", work_at(1))] * 2


@pytest.mark.parametrize("first", [MOVED, NOT_HELD, ReplicaGone("t1")])
async def test_a_wrong_owner_costs_one_more_round(first: Any) -> None:
    replicas = Replicas(first, "done")
    assert await owners(replicas, Controller()).ask("t s", work_at) == "done"
    assert [asked[0] for asked in replicas.asked] == ["t1", "t2"]


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [
        (ReplicaGone("t1"), FailoverCause.LOST),
        (ErrorInfo(503, "engine_stopped", "the engine died"), FailoverCause.LOST),
        (unavailable("the replica is drained"), FailoverCause.REFUSED),
        (MOVED, FailoverCause.REFUSED),
    ],
)
async def test_failovers_are_counted_by_cause(refusal: Any, cause: FailoverCause) -> None:
    """Refusals of replicas that drain used to count as losses. Planned changes beside one death then set off
    KedgeFailoverBurst."""
    metrics = IngressMetrics("i")
    answers = [MOVED, refusal, "done"]  # after the first, only the owner is asked for again
    ask = owners(Replicas(*answers), Controller(), metrics=metrics).ask
    assert await ask("t s", work_at) == "done"
    assert failovers(metrics) == failovers(metrics, cause) == 1


async def test_a_replica_that_answered_before_is_reported_lost() -> None:
    controller = Controller()
    ask = owners(Replicas(1, ReplicaGone("t1"), BUSY, 2), controller).ask
    await ask("t s", work_at)
    # The lost call may still be in the way at the replica, so a refusal after it is tried again.
    assert await ask("t s", work_at) == 2
    assert controller.lost == ["t1"]


class OneOwner(Controller):
    """The owner is "t1" until it is reported lost. The first report takes forever."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = 0

    async def resolve(self, session_id: str, create: bool, tenant: str, *wishes: Any) -> Assignment:
        self.epoch = len(self.lost)
        return await super().resolve(session_id, create, tenant, *wishes)

    async def report_unreachable(self, replica_id: str, died: bool) -> bool:
        self.reports += 1
        if self.reports == 1:
            await asyncio.Event().wait()
        return await super().report_unreachable(replica_id, died)


async def test_a_report_that_is_cut_off_is_made_by_who_notices_next() -> None:
    controller = OneOwner()
    replicas = Replicas(1, ReplicaGone("t1"), ReplicaGone("t1"), 2)
    ask = owners(replicas, controller).ask
    await ask("t s", work_at)
    leaving = asyncio.create_task(ask("t s", work_at))
    while not controller.reports:
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert await ask("t s", work_at) == 2
    assert controller.lost == ["t1"]


@pytest.mark.parametrize("refusal", [BUSY, ErrorInfo(400, "invalid_fork", "too long", "length")])
async def test_refusals_are_the_clients(refusal: ErrorInfo) -> None:
    with pytest.raises(ServiceError) as caught:
        await owners(Replicas(refusal), Controller()).ask("t s", work_at)
    assert caught.value.info == refusal


async def test_an_unknown_session() -> None:
    with pytest.raises(ServiceError) as caught:
        await owners(Replicas(NOT_HELD, NOT_HELD), Controller()).ask("t s", work_at)
    assert caught.value.info == NOT_HELD
    missing = SessionNotFound("no session", "session_id")
    with pytest.raises(ServiceError) as caught:
        await owners(Replicas(), Controller(missing)).ask("t s", work_at)
    assert caught.value.info == error_info(missing)


async def test_no_replica_is_waited_for_but_not_for_ever() -> None:
    nobody = NoReplica("none")
    assert await owners(Replicas("done"), Controller(nobody, nobody)).ask("t s", work_at) == "done"
    lost = Replicas(*[ReplicaGone("x")] * 1000)
    with pytest.raises(ServiceError) as caught:
        await owners(lost, Controller(), timeout_s=0.05).ask("t s", work_at)
    assert (caught.value.info.status, caught.value.info.code) == (503, "replica_unavailable")
