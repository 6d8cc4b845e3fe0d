"""A long step is no fault, and the heartbeat tells its age. If a step never ends, the replica is taken out of use and
its turns go on elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.api import EngineStopped
from serving.replica.engine_watch import EngineWatch
from tests.unit.serving.replica_rig import WAIT_S, Rig, call, running_rig

SLOW_S = 0.05


def watch_of(rig: Rig, step_timeout_s: float) -> EngineWatch:
    return EngineWatch(rig.engine, rig.heartbeats, step_timeout_s=step_timeout_s)


async def step_older_than(rig: Rig, age_s: float) -> None:
    async with asyncio.timeout(WAIT_S):
        while rig.engine.step_age_s < age_s:
            await asyncio.sleep(0.001)


async def test_a_slow_step_is_no_fault(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        assert rig.engine.step_age_s == 0.0, "it waits for a command"
        rig.runner.hold()
        turn = asyncio.create_task(rig.run(call([1, 2], "s"), epoch))
        await step_older_than(rig, SLOW_S)
        watch = watch_of(rig, WAIT_S)
        await watch.look()
        assert watch.fault is None
        assert rig.heartbeats.status().step_age_s >= SLOW_S
        await rig.heartbeats.beat()
        rig.runner.go_on()
        assert (await turn)[-1].finish is not None
        async with asyncio.timeout(WAIT_S):
            while rig.engine.step_age_s:
                await asyncio.sleep(0.001)
        assert watch_of(rig, SLOW_S).fault is None


async def test_a_step_that_hangs_takes_the_replica_out_of_use(tmp_path: Path) -> None:
    """Its turns used to wait until Serve killed the replica, and meanwhile the controller placed new sessions there."""
    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        rig.runner.hold()
        turn = asyncio.create_task(rig.run(call([1, 2], "s"), epoch))
        await step_older_than(rig, SLOW_S)
        watch = watch_of(rig, SLOW_S)
        assert watch.fault is not None
        assert "hangs" in watch.fault
        await watch.look()
        await rig.heartbeats.farewell()
        rig.controller.cluster.tick()
        lost = [m.value for m in rig.controller.cluster.measures() if m.name == "controller_replicas_lost"]
        assert lost == [1.0], "it said farewell, and is a loss nevertheless"
        async with asyncio.timeout(WAIT_S):
            events = await turn
        assert events[-1].error is not None
        assert events[-1].error.code == EngineStopped.code, "after which the ingress goes on elsewhere"
        with pytest.raises(EngineStopped):
            rig.engine.flush()
        assert rig.controller.cluster.replicas() == []
        await rig.heartbeats.beat()
        assert rig.controller.cluster.replicas() == [], "it says no more"
        rig.runner.go_on()
        async with asyncio.timeout(WAIT_S):
            while rig.engine.step_age_s:
                await asyncio.sleep(0.001)
        await watch.look()
        assert watch.fault is not None, "for good"


async def test_an_engine_that_has_ended_is_a_fault(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        rig.open_session("s")
        await asyncio.to_thread(rig.engine.stop, 5.0)
        watch = watch_of(rig, WAIT_S)
        assert watch.fault == "the engine's thread has ended"
        await watch.look()
        assert rig.controller.cluster.replicas() == []


async def test_a_replica_that_has_left_does_not_register_again(tmp_path: Path) -> None:
    """It used to, if the answer to its last heartbeat asked for that. The controller then counted on it again."""
    async with running_rig(tmp_path) as rig:
        rig.open_session("s")
        rig.controller.cluster.report_unreachable(rig.replica_id, True)  # so it is asked to register again
        real = rig.controller.heartbeat

        async def heartbeat(*args: Any) -> Any:
            reply = await real(*args)
            await rig.heartbeats.farewell()  # while the answer is on its way
            return reply

        rig.controller.heartbeat = heartbeat
        await rig.heartbeats.beat()
        assert rig.controller.cluster.replicas() == []
