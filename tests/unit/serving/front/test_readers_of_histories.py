"""Who reads a session's history back does not use the session: its idle clock goes on."""

from __future__ import annotations

from pathlib import Path

from controllers.session_keys import session_key
from tests.unit.serving.failover_rig import running_failover
from tests.unit.serving.replica_rig import call


async def test_reading_does_not_begin_the_idle_clock_anew(tmp_path: Path) -> None:
    """The ledger and the console then showed a session as just used, and its owner ended it as unused for an hour."""
    async with running_failover(tmp_path) as served:
        for rig in served.rigs:
            rig.runner.step_s = 0.0
        served.open_session("s")
        await served.turn(call([1, 2, 3], "s"))
        key = session_key("", "s")
        before = served.cluster.session(key).last_used_s
        turns = await served.service.transcript("s", tenant="")
        assert [turn.turn_index for turn in turns] == [0]
        assert served.cluster.session(key).last_used_s == before
        for rig in served.rigs:
            rig.runner.go_on()
        await served.settled()
