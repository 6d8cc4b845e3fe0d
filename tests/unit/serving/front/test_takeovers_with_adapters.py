"""A turn that loses its replica goes on with its adapter. During an update it waits for a replica that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.api import AdapterNotLoaded
from serving.front import turn_dispatch
from serving.wire.turns import ServiceError, TurnCall
from serving.wire.versions import UNKNOWN_CALL
from tests.unit.engine.null_runner import null_generate
from tests.unit.serving.failover_rig import behind, running_failover
from tests.unit.serving.replica_rig import VOCAB_SIZE, call

LENGTH = 30


@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("error", [AdapterNotLoaded("older settings"), ServiceError(UNKNOWN_CALL)])
async def test_who_is_in_mid_stream_waits_for_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, session: str | None
) -> None:
    """The turn used to end where the next replica was an older one."""
    monkeypatch.setattr(turn_dispatch, "RETRY_PAUSE_S", 0.005)
    async with running_failover(tmp_path) as served:
        check, refusals = served.rigs[1].builder.check, [error] * 3

        def older_at_first(asked: TurnCall) -> None:
            if refusals:
                raise refusals.pop()
            check(asked)

        monkeypatch.setattr(served.rigs[1].builder, "check", older_at_first)
        served.open_session("s")
        served.replicas.losses = {"a": behind(3)}
        whole = await served.turn(call([5, 6, 7], session, max_new_tokens=LENGTH, adapter="a"))
        assert list(whole.token_ids) == null_generate([5, 6, 7], LENGTH, VOCAB_SIZE)
        assert not refusals
        asked = [(name, each.adapter) for name, each in served.replicas.calls]
        assert asked == [("a", "a")] + [("b", "a")] * 4
        await served.settled()
