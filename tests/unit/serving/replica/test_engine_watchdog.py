"""A step that takes long is no fault; one that does not end is, and the heartbeat says how old it is."""

from __future__ import annotations

import asyncio
from pathlib import Path

from serving.replica.replica import engine_fault
from tests.unit.serving.replica_rig import WAIT_S, call, running_rig

SLOW_S = 0.05


async def test_a_step_that_hangs_is_found_and_a_slow_one_is_not(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        epoch = rig.open_session("s")
        assert rig.engine.step_age_s == 0.0, "it waits for a command"
        rig.runner.hold()
        turn = asyncio.create_task(rig.run(call([1, 2], "s"), epoch))
        await rig.begun()
        async with asyncio.timeout(WAIT_S):
            while rig.engine.step_age_s < SLOW_S:
                await asyncio.sleep(0.001)
        assert engine_fault(rig.engine, 60.0) is None
        fault = engine_fault(rig.engine, SLOW_S)
        assert fault is not None
        assert "hangs" in fault
        assert rig.host.status().step_age_s >= SLOW_S
        await rig.host.heartbeat()
        rig.runner.go_on()
        await turn
        async with asyncio.timeout(WAIT_S):
            while rig.engine.step_age_s:
                await asyncio.sleep(0.001)
        assert engine_fault(rig.engine, SLOW_S) is None


async def test_an_engine_that_has_ended_is_a_fault(tmp_path: Path) -> None:
    async with running_rig(tmp_path) as rig:
        await asyncio.to_thread(rig.engine.stop, 5.0)
        assert engine_fault(rig.engine, 60.0) == "the engine's thread has ended"
