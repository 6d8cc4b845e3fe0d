"""The controller's own pauses, from its start on: it takes no replica for silent because of a time when it could not
hear."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from manual_clock import ManualClock

from controllers.attended_clock import TICK_S
from controllers.cluster_actor import ClusterController
from controllers.errors import NoAnswer
from controllers.records import ReplicaStatus, SessionReport
from controllers.replicas import LATE_BEATS, SUSPECT_BEATS
from controllers.settings import ClusterSettings, SqliteLogSettings

PAUSE_S = 60.0
SILENCE_S = 10.0
HEARTBEAT_S = 2.0


def controller_at(path: Path, clock: ManualClock) -> ClusterController:
    settings = ClusterSettings(replica_timeout_s=SILENCE_S, heartbeat_interval_s=HEARTBEAT_S)
    return ClusterController(
        settings, SqliteLogSettings(str(path / "sessions.db")), "cluster", clock=clock, timer=clock
    )


async def test_a_pause_before_the_first_heartbeat_is_held_against_no_replica(
    tmp_path: Path, clock: ManualClock
) -> None:
    """The controller used to notice pauses only after the first heartbeat. Replicas that had only registered were gone
    then."""
    controller = controller_at(tmp_path, clock)
    await controller.register_replica(ReplicaStatus("a", 1000, 1000))
    clock.advance(PAUSE_S)
    assert [status.replica_id for status in await controller.replicas()] == ["a"]


async def test_a_pause_right_after_a_restart_moves_no_session(tmp_path: Path, clock: ManualClock) -> None:
    """The owner is not gone either, although the controller has not heard of it since the restart."""
    controller = controller_at(tmp_path, clock)
    await controller.register_replica(ReplicaStatus("a", 1000, 1000))
    opened = await controller.open_session("s")
    controller._cluster._store.disconnect()
    again = controller_at(tmp_path, clock)
    clock.advance(PAUSE_S)
    await again.register_replica(ReplicaStatus("b", 1000, 1000))
    resolved = await again.resolve("s")
    assert (resolved.replica_id, resolved.epoch) == ("a", opened.epoch)


async def test_after_a_restart_replicas_have_two_heartbeats_to_be_heard(
    tmp_path: Path, clock: ManualClock
) -> None:
    """Front ends took those that were not heard yet for gone, and gave up their turns."""
    controller = controller_at(tmp_path, clock)
    await controller.register_replica(ReplicaStatus("a", 1000, 1000))
    controller._cluster._store.disconnect()
    again = controller_at(tmp_path, clock)
    await again.register_replica(ReplicaStatus("b", 1000, 1000))
    assert [status.replica_id for status in await again.replicas()] == ["b"]
    for _ in range(int((SUSPECT_BEATS + LATE_BEATS) * HEARTBEAT_S / TICK_S)):
        with pytest.raises(NoAnswer):
            await again.replicas(all_heard=True)
        clock.advance(TICK_S)
        again._cluster.tick()
    await again.heartbeat(ReplicaStatus("b", 1000, 1000), SessionReport(1, 0))
    assert [status.replica_id for status in await again.replicas(all_heard=True)] == ["b"]


async def test_who_is_silent_while_the_controller_is_there_is_gone(
    tmp_path: Path, clock: ManualClock
) -> None:
    """The controller's own ticks show that it is there."""
    controller = controller_at(tmp_path, clock)
    await controller.register_replica(ReplicaStatus("a", 1000, 1000))
    deadline_s = clock() + SILENCE_S + 1.0
    while await controller.replicas() and clock() < deadline_s:
        clock.advance(TICK_S)
        controller._cluster.tick()
        await asyncio.sleep(0)
    assert clock() - 1000.0 > SILENCE_S
    assert await controller.replicas() == []
