"""Turns that the controller's own methods commit together: one transaction, but each turn is treated as if it came
alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from manual_clock import ManualClock

from controllers.cluster_actor import ClusterController
from controllers.errors import ControllerError, SessionNotFound, StaleEpoch, StoreError
from controllers.records import ForkOrder, ReplicaStatus, TurnRecord
from controllers.session_log.sqlite_store import SqliteSessionStore
from controllers.settings import ClusterSettings, SqliteLogSettings
from controllers.tokens import encode_tokens, unpack_tokens
from tests.unit.controllers.measured import measured


@pytest.fixture
async def controller(tmp_path: Path, clock: ManualClock) -> AsyncIterator[ClusterController]:
    log = SqliteLogSettings(str(tmp_path / "sessions.db"), full_sync=True)
    controller = ClusterController(ClusterSettings(), log, "cluster", clock=clock, timer=clock)
    for replica_id in ("a", "b"):
        await controller.register_replica(ReplicaStatus(replica_id, 1000, 1000))
    yield controller
    if controller._ticks is not None:
        controller._ticks.cancel()
    store_of(controller).disconnect()


def store_of(controller: ClusterController) -> SqliteSessionStore:
    store = controller._cluster._store
    assert isinstance(store, SqliteSessionStore)
    return store


def statements(controller: ClusterController) -> Counter[str]:
    """Counts SQL statements by their first word, from now on."""
    counts: Counter[str] = Counter()
    store_of(controller)._connection.set_trace_callback(lambda text: counts.update([text.split(" ")[0]]))
    return counts


def turn(
    session_id: str, index: int, *tokens: int, start_len: int | None = None, epoch: int = 1
) -> TurnRecord:
    start_len = 2 * index if start_len is None else start_len
    return TurnRecord(session_id, epoch, index, start_len, encode_tokens(tokens or (1, 2)), 1, f"key-{index}")


async def outcome(controller: ClusterController, record: TurnRecord) -> ControllerError | None:
    (outcome,) = await controller.commit_turns([record])
    return outcome


def history(controller: ClusterController, session_id: str) -> list[int]:
    return unpack_tokens(store_of(controller).load(session_id).history).tolist()


@pytest.mark.parametrize("count", [1, 10, 100])
async def test_turns_that_come_together_are_one_transaction(
    controller: ClusterController, count: int
) -> None:
    """Each turn used to have its own transaction. With `full_sync` that was one flush of the disk for each turn."""
    names = [f"s{number}" for number in range(count)]
    for name in names:
        await controller.open_session(name)
    counts = statements(controller)
    assert await asyncio.gather(*(outcome(controller, turn(name, 0)) for name in names)) == [None] * count
    assert (counts["BEGIN"], counts["COMMIT"], counts["ROLLBACK"]) == (1, 1, 0)
    assert sum(counts.values()) <= 12 * count + 2, counts
    assert [entry.turns for entry in await controller.sessions()] == [1] * count
    assert measured(controller._cluster, "controller_turns_committed") == count


async def test_one_bad_turn_does_not_spoil_the_others(controller: ClusterController) -> None:
    for name in "stu":
        await controller.open_session(name)
    await outcome(controller, turn("t", 0))
    told = await asyncio.gather(
        *(
            outcome(controller, record)
            for record in (
                turn("s", 0),
                turn("t", 1, epoch=9),
                turn("nobody", 0),
                turn("u", 3),
                turn("t", 1, 7),
            )
        )
    )
    assert [type(each) for each in told] == [type(None), StaleEpoch, SessionNotFound, StaleEpoch, type(None)]
    assert (history(controller, "s"), history(controller, "t"), history(controller, "u")) == (
        [1, 2],
        [1, 2, 7],
        [],
    )
    for name in ("controller_turns_committed", "controller_turns_refused"):
        assert measured(controller._cluster, name) == 3


async def test_turns_of_one_session_in_one_group_follow_each_other(controller: ClusterController) -> None:
    """The group has a first try and its repetition, the next turn, and a rewind of both."""
    await controller.open_session("s")
    records = [turn("s", 0), turn("s", 0), turn("s", 1, 3, 4), turn("s", 2, 5, start_len=1), turn("s", 2, 6)]
    told = await asyncio.gather(*(outcome(controller, record) for record in records))
    assert [type(each) for each in told] == [type(None)] * 4 + [StaleEpoch]
    assert history(controller, "s") == [1, 5]
    (entry,) = await controller.sessions()
    assert (entry.turns, entry.tokens) == (3, 2)
    assert measured(controller._cluster, "controller_turns_committed") == 3


async def test_a_turn_that_waits_is_fenced_when_it_is_written(controller: ClusterController) -> None:
    """A move, a close or a fork that comes before the write counts as if it had come before the turn."""
    opened = {name: await controller.open_session(name) for name in "stuv"}
    waiting = [asyncio.create_task(outcome(controller, turn(name, 0))) for name in "stuv"]
    await asyncio.sleep(0)  # all turns wait, and none is written
    await controller.drain_replica(opened["s"].replica_id)
    assert await controller.offer_session("s", 1, opened["s"].replica_id)
    assert await controller.close_session("t")
    child = await controller.fork_session("u", 1, opened["u"].replica_id, ForkOrder("child", "k"))
    told = await asyncio.gather(*waiting)
    assert [type(each) for each in told] == [StaleEpoch, SessionNotFound, type(None), type(None)]
    assert (history(controller, "s"), history(controller, "u"), history(controller, "v")) == (
        [],
        [1, 2],
        [1, 2],
    )
    assert (child.turns, history(controller, "child")) == (0, []), "it was forked before the turn"
    assert await outcome(controller, turn("s", 0, epoch=2)) is None


async def test_a_disk_that_fails_is_told_to_all_and_leaves_no_trace(controller: ClusterController) -> None:
    for name in "st":
        await controller.open_session(name)
    store_of(controller)._connection.execute("PRAGMA query_only = ON")
    told = await asyncio.gather(*(outcome(controller, turn(name, 0)) for name in "st"))
    assert [type(each) for each in told] == [StoreError, StoreError]
    assert [entry.turns for entry in await controller.sessions()] == [0, 0]
    store_of(controller)._connection.execute("PRAGMA query_only = OFF")
    assert await asyncio.gather(*(outcome(controller, turn(name, 0)) for name in "st")) == [None, None]


async def test_a_turn_that_cannot_be_written_fails_alone(controller: ClusterController) -> None:
    """The turn's row exists already, which our code never leaves so. The other turns of its group must not fail or wait
    for it."""
    for name in "st":
        await controller.open_session(name)
    store_of(controller)._connection.execute("INSERT INTO turns VALUES ('s', 0, 0, x'00')")
    told = await asyncio.gather(*(outcome(controller, turn(name, 0)) for name in "st"))
    assert [type(each) for each in told] == [StoreError, type(None)]
    assert history(controller, "t") == [1, 2]
