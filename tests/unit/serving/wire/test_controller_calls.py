"""Calls to a controller of three shards: each a real Cluster with a log of its own."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from controllers.cluster import Cluster
from controllers.errors import InvalidFork, NoAnswer, NoReplica, SessionExists, SessionNotFound, StaleEpoch
from controllers.records import (
    Assignment,
    Checkpoint,
    ForkOrder,
    ReplicaStatus,
    SessionReport,
    SessionStatus,
    TurnRecord,
)
from controllers.settings import ClusterSettings
from controllers.tokens import encode_tokens
from serving.wire import controller_calls
from serving.wire.controller_calls import ControllerCalls
from tests.unit.serving.replica_rig import WAIT_S, LocalController, local_controller

SHARDS = 3
TOKENS = encode_tokens([1, 2, 3, 4])


@dataclass
class Shards:
    calls: ControllerCalls
    each: list[LocalController]

    def name_of(self, shard: int, prefix: str = "s") -> str:
        """An id that belongs to the shard."""
        names = (f"{prefix}{number}" for number in itertools.count())
        return next(name for name in names if self.calls.shard_of(name) == shard)

    async def with_turn(self, name: str) -> Assignment:
        """Opens a session with one committed turn."""
        opened = await self.calls.open_session(name)
        place = Checkpoint(1, b"digest", 2)
        turn = TurnRecord(
            name, opened.epoch, 0, 0, TOKENS, 2, tools="t", checkpoint=place, whole=True, note=b"hello"
        )
        await self.calls.commit_turn(turn)
        return opened


@pytest.fixture
async def shards(tmp_path: Path) -> Shards:
    each = []
    for shard in range(SHARDS):
        (tmp_path / str(shard)).mkdir()
        each.append(local_controller(tmp_path / str(shard)))
    calls = ControllerCalls(cast(Any, each))
    for name in ("a", "b"):
        await calls.register_replica(ReplicaStatus(name, 1000, 1000))
    return Shards(calls, each)


async def figures(shards: Shards, name: str) -> list[float]:
    """The values of all series of a measure, in the order of their labels."""
    told = await shards.calls.figures(WAIT_S)
    found = [each for each in told.joined if each.name == name]
    return [each.value for each in sorted(found, key=lambda each: each.labels)]


async def test_each_session_is_at_the_shard_of_its_key(shards: Shards) -> None:
    names = [f"anna-{number}" for number in range(60)]
    for name in names:
        await shards.calls.open_session(name, "tenant")
    counts = [controller.cluster.count() for controller in shards.each]
    assert sum(counts) == len(names)
    assert min(counts) > 5
    for name in names:
        found = await shards.calls.resolve(name, False, "tenant")
        assert found.session_id == f"tenant {name}"
        assert (await shards.calls.session(found.session_id)).tenant == "tenant"
    assert await shards.calls.close_session(names[0], "tenant")
    with pytest.raises(SessionNotFound):
        await shards.calls.resolve(names[0], False, "tenant")


async def test_pages_of_sessions_are_in_order_over_all_shards(shards: Shards) -> None:
    names = sorted(f"s{number:02}" for number in range(30))
    for name in reversed(names):
        await shards.calls.open_session(name)
    read: list[str] = []
    after = None
    while page := await shards.calls.sessions(None, after, 7):
        assert len(page) <= 7
        read += [entry.session_id for entry in page]
        after = read[-1]
    assert read == names


@pytest.mark.parametrize("same", [True, False])
async def test_a_fork_begins_with_its_parents_history_wherever_it_belongs(shards: Shards, same: bool) -> None:
    parent, child = shards.name_of(0), shards.name_of(0 if same else 1, "child-")
    owner = await shards.with_turn(parent)
    order = ForkOrder(child, "fork-1", length=3)
    made = await shards.calls.fork_session(parent, owner.epoch, owner.replica_id, order)
    assert (made.session_id, made.replica_id, made.history) == (child, owner.replica_id, b"")
    again = await shards.calls.fork_session(parent, owner.epoch, owner.replica_id, order)
    assert again == made
    loaded = await shards.calls.load_session(child, made.epoch, made.replica_id)
    assert (loaded.history, loaded.turns, loaded.tools) == (encode_tokens([1, 2, 3]), 0, "t")
    assert ([each.length for each in loaded.checkpoints], loaded.whole) == ([2], True)
    (note,) = await shards.calls.notes(child, "")
    assert (note.turn_index, note.note, note.end_len) == (-1, b"hello", 3)
    turn = TurnRecord(child, made.epoch, 0, 3, encode_tokens([9]), 1)
    await shards.calls.commit_turn(turn)
    assert (await shards.calls.load_session(child, made.epoch, made.replica_id)).history == encode_tokens(
        [1, 2, 3, 9]
    )
    # Each may end without the other.
    assert await shards.calls.close_session(parent)
    assert (await shards.calls.load_session(child, made.epoch, made.replica_id)).num_tokens == 4
    assert await shards.calls.close_session(child)
    assert not (await shards.calls.sessions())


async def test_a_fork_to_another_shard_is_refused_as_one_within(shards: Shards) -> None:
    parent, taken, child = shards.name_of(0), shards.name_of(1), shards.name_of(1, "child-")
    owner = await shards.with_turn(parent)
    await shards.calls.open_session(taken)

    async def fork(name: str, epoch: int, length: int | None) -> None:
        order = ForkOrder(name, "fork-1", length=length)
        await shards.calls.fork_session(parent, epoch, owner.replica_id, order)

    with pytest.raises(SessionExists):
        await fork(taken, owner.epoch, None)
    with pytest.raises(StaleEpoch):
        await fork(child, owner.epoch + 1, None)
    with pytest.raises(InvalidFork):
        await fork(child, owner.epoch, 5)
    assert (await shards.calls.session(parent)).tokens == 4
    with pytest.raises(SessionNotFound):
        await shards.calls.session(child)


async def test_replicas_are_told_to_all_shards_and_counted_once(shards: Shards) -> None:
    for number in range(12):
        await shards.calls.open_session(f"s{number}")
    statuses = await shards.calls.replicas()
    assert [status.replica_id for status in statuses] == ["a", "b"]
    assert sum(status.sessions for status in statuses) == 12
    assert await figures(shards, "controller_replicas_live") == [2.0] * SHARDS
    assert sum(await figures(shards, "controller_sessions_opened")) == 12.0
    told = (await shards.calls.figures(WAIT_S)).joined
    assert max(Counter((each.name, each.labels) for each in told).values()) == 1
    await shards.calls.drain_replica("a")
    assert [status.draining for status in await shards.calls.replicas()] == [True, False]
    states = [controller.cluster.watch.view(None, 0).states["a"] for controller in shards.each]
    assert states == ["draining"] * SHARDS
    assert await shards.calls.report_unreachable("a", True)
    assert [status.replica_id for status in await shards.calls.replicas()] == ["b"]


async def test_a_shard_that_starts_again_takes_nothing_from_what_the_others_have_counted(
    shards: Shards,
) -> None:
    """Prometheus takes a counter that falls for one that began again at zero. A sum over the shards fell, and all that
    the others had ever counted seemed to be new: alerts fired for moves that nobody had made."""
    names = [f"s{number}" for number in range(12)]
    for name in names:
        await shards.calls.open_session(name)
    await shards.calls.report_unreachable("a", True)
    for shard in shards.each:
        shard.cluster.tick()
    for name in names:
        await shards.calls.resolve(name)
    counters = ("controller_sessions_opened", "ownership_transfers", "controller_replicas_lost")
    before = {name: await figures(shards, name) for name in counters}
    assert all(sum(counted) > 0 for counted in before.values())
    again = shards.each[1]
    again.cluster = Cluster(ClusterSettings(), cast(Any, again.log), time.time, time.perf_counter)
    for name, counted in before.items():
        seen = zip(counted, await figures(shards, name), strict=True)
        assert not any(now - was if now >= was else now for was, now in seen), name


async def test_who_is_there_is_known_while_a_shard_does_not_answer(shards: Shards) -> None:
    away = NoAnswer("no answer")
    shards.each[0].failures["replicas"] = [away]
    assert len(await shards.calls.replicas()) == 2
    for controller in shards.each:
        controller.failures["replicas"] = [away]
    with pytest.raises(NoAnswer):
        await shards.calls.replicas()


async def test_a_shard_that_hangs_does_not_hide_who_is_there(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Front ends would not notice for 15 s that a replica came or went."""
    monkeypatch.setattr(controller_calls, "STRAGGLER_S", 0.01)
    shards.each[0].gate.clear()
    async with asyncio.timeout(10.0):
        assert len(await shards.calls.replicas()) == 2
    await asyncio.sleep(0)  # the cancelled call ends
    assert shards.each[0].waiting == 0


@pytest.mark.parametrize("hangs", [True, False])
async def test_figures_are_told_without_a_shard_that_does_not_answer(shards: Shards, hangs: bool) -> None:
    """One shard of three kept all figures away."""
    for shard in range(SHARDS):
        await shards.calls.open_session(shards.name_of(shard))
    patience_s = WAIT_S
    if hangs:
        shards.each[1].gate.clear()
        patience_s = 0.05
    else:
        shards.each[1].failures["measures"] = [NoAnswer("no answer")]
    told = await shards.calls.figures(patience_s)
    assert told.missing == (1,)
    assert {dict(each.labels)["shard"] for each in told.joined} == {"0", "2"}
    assert (await shards.calls.figures(patience_s)).missing == ((1,) if hangs else ())


async def test_a_view_is_told_without_a_shard_that_does_not_answer(shards: Shards) -> None:
    """The console showed nothing new. What happened there meanwhile is told later, and nothing twice."""
    first = await shards.calls.look(None, 10, WAIT_S)
    names = [shards.name_of(shard) for shard in range(SHARDS)]
    for name in names:
        await shards.calls.open_session(name)
    shards.each[0].failures["view"] = [NoAnswer("no answer")]
    told = await shards.calls.look(first.joined.cursor, 10, WAIT_S)
    assert (told.missing, told.joined.sessions) == ((0,), 2)
    assert {entry.session_id for entry in told.joined.recent} == set(names[1:])
    assert [event.session_id for event in told.joined.events] == names[1:]
    assert told.joined.states == first.joined.states
    again = await shards.calls.look(told.joined.cursor, 10, WAIT_S)
    assert (again.missing, again.joined.sessions) == ((), 3)
    assert [event.session_id for event in again.joined.events] == names[:1]
    for controller in shards.each:
        controller.failures["view"] = [NoAnswer("no answer")]
    with pytest.raises(NoAnswer):
        await shards.calls.look(None, 10, WAIT_S)


async def test_a_list_of_sessions_is_not_told_without_a_shard(shards: Shards) -> None:
    """Nothing in it could say that sessions are missing."""
    shards.each[1].failures["sessions"] = [NoAnswer("no answer")]
    with pytest.raises(NoAnswer):
        await shards.calls.sessions()


async def test_a_view_has_the_events_of_all_shards_once(shards: Shards) -> None:
    first = (await shards.calls.look(None, 10, WAIT_S)).joined
    assert [event.kind for event in first.events] == ["replica_up", "replica_up"]
    for number in range(9):
        await shards.calls.open_session(f"s{number}")
    view = (await shards.calls.look(first.cursor, 5, WAIT_S)).joined
    assert [event.kind for event in view.events] == ["opened"] * 9
    assert (view.sessions, len(view.recent)) == (9, 5)
    assert not (await shards.calls.look(view.cursor, 5, WAIT_S)).joined.events
    assert len((await shards.calls.look("another/3", 5, WAIT_S)).joined.events) == 11


async def test_each_shard_hears_of_its_own_sessions(shards: Shards) -> None:
    """What a replica reports to one shard says nothing about the sessions of the others."""
    names = [shards.name_of(shard) for shard in range(SHARDS)]
    epochs = {name: (await shards.calls.open_session(name)).epoch for name in names}
    for shard, name in enumerate(names):
        owner = (await shards.calls.session(name)).replica_id
        report = SessionReport(1, 0, (SessionStatus(name, epochs[name], 7, 1, 0.0, False),))
        reply = await shards.calls.shards[shard].heartbeat(ReplicaStatus(owner, 1000, 1000, held=1), report)
        assert (reply.known, reply.stale_sessions) == (True, ())
    assert all(entry.reported_s is not None for entry in await shards.calls.sessions())
    orphans = [each for each in (await shards.calls.figures(WAIT_S)).joined if "orphaned" in each.name]
    assert not any(each.value for each in orphans)


async def test_a_shard_that_hangs_does_not_hold_up_turns_that_lose_their_replica(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn that lost the replica used to wait for the shard's timeout before it was tried elsewhere."""
    monkeypatch.setattr(controller_calls, "STRAGGLER_S", 0.01)
    shards.each[1].gate.clear()
    async with asyncio.timeout(10.0):
        assert await shards.calls.report_unreachable("a", True)
    assert [status.replica_id for status in await shards.calls.replicas()] == ["b"]


async def test_a_drain_that_has_begun_is_not_reported_as_refused(shards: Shards) -> None:
    """The first shard makes the replica drain, whatever another one answers."""
    shards.each[1].failures["drain_replica"] = [NoReplica("none but this one is known yet")]
    await shards.calls.drain_replica("a")
    shards.each[0].failures["drain_replica"] = [NoReplica("there is no other")]
    with pytest.raises(NoReplica):
        await shards.calls.drain_replica("b")
    assert shards.each[2].cluster.watch.view(None, 0).states["b"] == "up"


@pytest.mark.parametrize("hangs", range(SHARDS))
async def test_a_shard_that_hangs_does_not_hold_up_a_drain(
    shards: Shards, monkeypatch: pytest.MonkeyPatch, hangs: int
) -> None:
    """A replica that is to go has 18 s. It used to wait 15 of them for a shard before it handed over any session."""
    for name in ("DECIDES_S", "STRAGGLER_S"):
        monkeypatch.setattr(controller_calls, name, 0.01)
    shards.each[hangs].gate.clear()
    async with asyncio.timeout(10.0):
        await shards.calls.drain_replica("a")
    states = [controller.cluster.watch.view(None, 0).states["a"] for controller in shards.each]
    assert states == ["up" if shard == hangs else "draining" for shard in range(SHARDS)]
    await asyncio.sleep(0)  # the cancelled calls end
    assert shards.each[hangs].waiting == 0


async def test_a_drain_that_the_shard_which_answers_refuses_is_refused(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_calls, "DECIDES_S", 0.01)
    shards.each[0].failures["drain_replica"] = [NoAnswer("no answer")]
    shards.each[1].failures["drain_replica"] = [NoReplica("there is no other")]
    with pytest.raises(NoReplica):
        await shards.calls.drain_replica("a")
    assert [each.cluster.watch.view(None, 0).states["a"] for each in shards.each] == ["up"] * SHARDS
