"""During an update some replicas lack an adapter. A new turn goes to one that has it; one in mid-stream also waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from controllers.records import ReplicaStatus
from engine.api import AdapterNotLoaded
from engine.engine import LocalEngine
from serving.front import session_owners
from serving.front.known_places import KnownPlaces
from serving.front.ownership_cache import OwnershipCache
from serving.front.session_owners import SessionOwners
from serving.front.turn_dispatch import TurnDispatcher
from serving.replica.link_server import Emit
from serving.watch.metrics import FailoverCause, IngressMetrics
from serving.wire.calls import AnyCall, RunAdaptedTurn
from serving.wire.errors import error_event, unavailable
from serving.wire.turn_events import merge_events
from serving.wire.turns import ServiceError, TurnCall, TurnEvent, TurnFinish
from serving.wire.versions import UNKNOWN_CALL
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import Failover, behind, failovers, running_failover
from tests.unit.serving.link_rig import running_link
from tests.unit.serving.replica_rig import VOCAB_SIZE, WAIT_S, call

LENGTH = 30
WHOLE = null_generate([5, 6, 7], LENGTH, VOCAB_SIZE)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_owners, "RETRY_PAUSE_S", 0.005)


def take_adapters(served: Failover, *names: str) -> None:
    """These replicas are from before the update."""
    for name in names:
        engine = served.replicas.rigs[name].engine
        assert isinstance(engine, LocalEngine)
        engine._facts = replace(engine._facts, adapters={})


def adapted(session: str | None = None) -> TurnCall:
    return call([5, 6, 7], session, max_new_tokens=LENGTH, adapter="a")


def asked(served: Failover) -> list[str]:
    return [name for name, _ in served.replicas.calls]


@pytest.mark.parametrize("session", [None, "s"])
async def test_a_new_turn_goes_to_a_replica_that_has_its_adapter(tmp_path: Path, session: str | None) -> None:
    """The first replica's refusal used to be the answer. The session is a conversation's, without which it can do."""
    async with running_failover(tmp_path, 3) as served:
        take_adapters(served, "a", "b")
        turn = adapted(session)
        if turn.session is not None:
            served.open_session("s")
            turn = replaced(turn, session=replaced(turn.session, fallback="unnamed"))
        whole = await served.turn(turn)
        assert list(whole.token_ids) == WHOLE
        assert asked(served) == ["a", "b", "c"]
        await served.settled()


async def test_an_adapter_that_nobody_has_is_asked_of_each_replica_once(tmp_path: Path) -> None:
    """And not until `failover_timeout_s` is over."""
    async with running_failover(tmp_path, 3) as served:
        take_adapters(served, "a", "b", "c")
        with pytest.raises(ServiceError) as refused:
            await served.turn(adapted())
        assert (refused.value.info.status, refused.value.info.code) == (503, "adapter_not_loaded")
        assert refused.value.info.retry_after_s is not None
        assert asked(served) == ["a", "b", "c"]
        assert failovers(served.metrics) == failovers(served.metrics, FailoverCause.REFUSED) == 2
        await served.settled()


async def test_a_session_s_turn_is_asked_of_its_owner_only(tmp_path: Path) -> None:
    async with running_failover(tmp_path) as served:
        take_adapters(served, "a")
        served.open_session("s")
        with pytest.raises(ServiceError) as refused:
            await served.turn(adapted("s"))
        assert refused.value.info.code == "adapter_not_loaded"
        assert asked(served) == ["a"]
        await served.settled()


LACKS = error_event(AdapterNotLoaded("older settings"))
DRAINS = TurnEvent(error=unavailable("the replica is drained"))
ENDS = TurnEvent(text="Arr", finish=TurnFinish("stop"))


async def over_links(*answers: TurnEvent) -> tuple[TurnEvent, list[str]]:
    """The end of a turn that three replicas answer with these in turn, and who they were. One that drains is listed so
    before it answers. One server is all three."""
    left, who = list(answers), []

    async def serve(asked: AnyCall, emit: Emit) -> None:
        assert isinstance(asked, RunAdaptedTurn)
        (turn,) = dispatcher._turns
        who.append(turn.facts.replica_id)
        answer = left.pop(0)
        if answer is DRAINS:
            rig.listed = [replace(each, draining=each.replica_id == who[-1]) for each in rig.listed]
            await rig.calls.look()
        emit(answer)

    async with running_link(serve) as rig:
        rig.listed = [ReplicaStatus(name, 100, 100, address=rig.address) for name in "rst"]
        controller: Any = rig
        places, metrics = KnownPlaces(9), IngressMetrics("i")
        owners = SessionOwners(
            rig.calls, controller, OwnershipCache(9), places, metrics, failover_timeout_s=WAIT_S
        )
        dispatcher = TurnDispatcher(rig.calls, owners, places, metrics)
        try:
            async with dispatcher.dispatch(adapted()) as events:
                end = merge_events([event async for event in events])
        except ServiceError as error:
            end = error_event(error)
    assert not left
    return end, who


async def test_over_real_links_each_replica_is_tried_before_one_is_tried_again() -> None:
    end, who = await over_links(LACKS, LACKS, ENDS)
    assert end.text == "Arr"
    assert sorted(who) == ["r", "s", "t"]
    end, who = await over_links(LACKS, LACKS, LACKS)
    assert (end, sorted(who)) == (LACKS, ["r", "s", "t"])


async def test_the_last_replica_to_try_drains() -> None:
    """The others are asked once more, and not until `failover_timeout_s` is over."""
    end, who = await over_links(LACKS, LACKS, DRAINS, LACKS)
    assert end == LACKS
    assert sorted(who[:3]) == ["r", "s", "t"]
    assert who[3] in who[:2]


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("error", [AdapterNotLoaded("older settings"), ServiceError(UNKNOWN_CALL)])
async def test_who_is_in_mid_stream_waits_for_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, session: str | None
) -> None:
    """The turn used to end where the next replica was an older one."""
    async with running_failover(tmp_path) as served:
        check, refusals = served.rigs[1].builder.check, [error] * 3

        def older_at_first(asked: TurnCall) -> None:
            if refusals:
                raise refusals.pop()
            check(asked)

        monkeypatch.setattr(served.rigs[1].builder, "check", older_at_first)
        served.open_session("s")
        served.replicas.losses = {"a": behind(3)}
        whole = await served.turn(adapted(session))
        assert list(whole.token_ids) == WHOLE
        assert not refusals
        called = [(name, each.adapter) for name, each in served.replicas.calls]
        assert called == [("a", "a")] + [("b", "a")] * 4
        await served.settled()
