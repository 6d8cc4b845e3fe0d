"""Rewinds and notes whose replica waits for the session log for longer than a front end waits for an answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import ControllerError
from serving.front.known_places import KnownPlaces
from serving.front.ownership_cache import OwnershipCache
from serving.front.replica_link import LinkTimes
from serving.front.session_owners import SessionOwners
from serving.replica.link_server import Emit
from serving.watch.metrics import IngressMetrics
from serving.wire.calls import AnyCall, KeepNote, RewindSession, answer_of
from serving.wire.errors import error_info
from serving.wire.turns import ServiceError
from tests.unit.serving.failover_rig import failovers
from tests.unit.serving.link_rig import LinkRig, running_link
from tests.unit.serving.replica_rig import WAIT_S, Rig, call, running_rig

CALL_TIMEOUT_S = 0.05
CALLS = {
    "note": lambda epoch: KeepNote("s", epoch, b"note", "once", None),
    "rewind": lambda epoch: RewindSession("s", epoch, 2, "once"),
}


class Replica:
    """Answers as LLMReplica does. `asked` are the calls that have come; `comes` is set with each."""

    def __init__(self, rig: Rig) -> None:
        self._empty_turns = rig.empty_turns
        self.asked: list[AnyCall] = []
        self.comes = asyncio.Event()

    async def serve(self, wanted: AnyCall, emit: Emit) -> None:
        self.asked.append(wanted)
        self.comes.set()
        try:
            if isinstance(wanted, KeepNote):
                emit(answer_of(await self._empty_turns.keep_note(wanted)))
            elif isinstance(wanted, RewindSession):
                emit(answer_of(await self._empty_turns.rewind(wanted)))
        except ControllerError as error:
            emit(answer_of(error_info(error)))

    async def was_asked(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.asked) < count:
                self.comes.clear()
                await self.comes.wait()


def owners_of(links: LinkRig, rig: Rig, metrics: IngressMetrics, failover_timeout_s: float) -> SessionOwners:
    """Those of a front end that must not report the replica."""
    rig.controller.failures["report_unreachable"] = [AssertionError("the replica answers")]
    parts: tuple[Any, ...] = (links.calls, rig.controller, OwnershipCache(9), KnownPlaces(9), metrics)
    return SessionOwners(*parts, failover_timeout_s=failover_timeout_s)


async def with_a_turn(rig: Rig, links: LinkRig) -> None:
    """Gives session "s" a turn and a note. The latter opens the link."""
    epoch = rig.open_session("s")
    await rig.run(call([1, 2, 3], "s"), epoch)
    await links.calls.call("r", KeepNote("s", epoch, b"first", "first", None), WAIT_S)


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_that_waits_for_the_log_says_nothing_against_its_replica(
    tmp_path: Path, kind: str
) -> None:
    """The front end used to report the replica each time. After ten seconds the controller took it for gone, and all
    turns left it."""
    metrics = IngressMetrics("i")
    async with running_rig(tmp_path, replica_id="r") as rig:
        replica = Replica(rig)
        options: dict[str, Any] = {"times": LinkTimes(), "call_timeout_s": CALL_TIMEOUT_S}
        async with running_link(replica.serve, **options) as links:
            await with_a_turn(rig, links)
            owners = owners_of(links, rig, metrics, WAIT_S)
            rig.controller.log.away = True
            asking = asyncio.create_task(owners.ask("s", CALLS[kind]))
            await replica.was_asked(4)
            assert not asking.done()
            rig.controller.log.away = False
            await asking
        entry = rig.controller.cluster.session("s")
        assert (entry.turns, entry.replica_id, entry.epoch) == (3, "r", 1), (
            "it was committed once, in its place"
        )
        assert failovers(metrics) == 0
        assert rig.controller.cluster.watch.view(None, 9).states == {"r": "up"}


async def test_past_its_time_such_a_call_ends_in_a_typed_error(tmp_path: Path) -> None:
    async with running_rig(tmp_path, replica_id="r") as rig:
        options: dict[str, Any] = {"times": LinkTimes(), "call_timeout_s": CALL_TIMEOUT_S}
        async with running_link(Replica(rig).serve, **options) as links:
            await with_a_turn(rig, links)
            owners = owners_of(links, rig, IngressMetrics("i"), 4 * CALL_TIMEOUT_S)
            rig.controller.log.away = True
            with pytest.raises(ServiceError) as caught:
                await owners.ask("s", CALLS["note"])
            rig.controller.log.away = False
        assert (caught.value.info.status, caught.value.info.code) == (503, "replica_unavailable")
        assert caught.value.info.retry_after_s is not None
