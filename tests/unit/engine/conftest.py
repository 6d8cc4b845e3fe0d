"""Fixtures that several tests of the engine share."""

from __future__ import annotations

import pytest

from tests.unit.engine.engine_rig import Rig


@pytest.fixture(params=[(False, 1), (True, 1), (True, 4)], ids=["plain", "ahead", "ahead by four"])
def ways_to_step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test three times: with one step at a time, with one step planned ahead, and with four steps in one
    launch."""
    runs_ahead, decode_steps = request.param
    monkeypatch.setattr(Rig, "runs_ahead", runs_ahead)
    monkeypatch.setattr(Rig, "decode_steps", decode_steps)
