"""Ranks in real processes die, hang or never come: every request is answered, and nothing waits forever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import EngineStopped, FinishReason
from engine.models.errors import UnsupportedModel
from engine.parallel.protocol import RanksNotStarted, Timeouts
from engine.settings import ModelSettings
from tests.unit.engine.driver import request
from tests.unit.engine.parallel.parallel_rig import ParallelRig, eventually, write_model

BOUND_S = 30.0
LONG = 400


@pytest.fixture
def step_s() -> float:
    return 60.0


@pytest.fixture
def rig(tmp_path: Path, step_s: float) -> Iterator[ParallelRig]:
    rig = ParallelRig(write_model(tmp_path), 2, timeouts=Timeouts(60.0, 30.0, step_s, 2.0))
    yield rig
    rig.stop()


@pytest.mark.parametrize(
    ("number", "step_s"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 2.0)], ids=["dead", "hung"]
)
def test_a_lost_rank_ends_every_request_with_a_typed_error(rig: ParallelRig, number: signal.Signals) -> None:
    """It ends them at once if the rank is dead, and after `step_s` if it hangs. The error ends the engine, not only the
    step, so that a turn in mid-stream goes on elsewhere."""
    (first,) = rig.generate(request("first", [4, 5, 6], 8))
    assert first.reason is FinishReason.LENGTH
    names = [f"r{index}" for index in range(12)]  # more than can run at once, so some wait
    rig.submit(*(request(name, [7, 8, index], LONG) for index, name in enumerate(names)))
    rig.wait_tokens("r0", 3)
    pid = rig.ranks.children[0]._process.pid
    assert pid is not None
    os.kill(pid, number)
    for outcome in rig.wait(*names, timeout_s=BOUND_S):
        assert outcome.reason is FinishReason.ERROR
        assert outcome.finish is not None
        assert isinstance(outcome.finish.error, EngineStopped)
    if number == signal.SIGKILL:
        assert any("rank 1 is gone" in str(rig.outcomes[name].finish.error) for name in names)  # type: ignore[union-attr]
    eventually(lambda: not rig.engine.alive, BOUND_S)
    with pytest.raises(EngineStopped):
        rig.submit(request("late", [4], 2))
    eventually(lambda: rig.ranks.children[0].ended() is not None)


def test_an_idle_engine_notices_a_death(rig: ParallelRig) -> None:
    pid = rig.ranks.children[0]._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not rig.engine.alive, BOUND_S)


def test_a_model_that_cannot_be_shared_out_stops_the_start(tmp_path: Path) -> None:
    model = write_model(tmp_path, intermediate_size=49)
    begun_s = time.monotonic()
    with pytest.raises(UnsupportedModel, match="intermediate_size 49"):
        ParallelRig(model, 2)
    assert time.monotonic() - begun_s < BOUND_S


def test_a_rank_that_ends_before_it_came_stops_the_start(tmp_path: Path) -> None:
    """The child cannot unpickle its settings, which name something that is not there."""
    model = write_model(tmp_path)
    broken = ModelSettings(_Unreadable(model.path), load_format="dummy", device="cpu", num_threads=1)
    with pytest.raises(RanksNotStarted, match="rank 1 ended at its start: exit status 1"):
        ParallelRig(broken, 2)


class _Unreadable(str):
    __slots__ = ()

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)
