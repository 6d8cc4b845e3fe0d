"""What calls to the cluster controller come to when it cannot answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayTaskError

from controllers.errors import StoreError
from serving.wire import controller_calls
from serving.wire.controller_calls import ControllerCalls
from serving.wire.errors import error_info

REASON = "cannot open session log /var/sessions.sqlite3: disk is full"
TRACEBACK = f"""Traceback (most recent call last):
  File "/srv/kedge/controllers/sqlite_schema.py", line 82, in open_session_log
controllers.errors.StoreError: {REASON}
"""


def controller_that_dies(times: list[str]) -> ActorHandle:
    async def call() -> Any:
        times.append("asked")
        raise ActorDiedError(RayTaskError("ClusterController.__init__", TRACEBACK, StoreError(REASON)))

    return cast(ActorHandle, SimpleNamespace(sessions=SimpleNamespace(remote=call)))


def test_a_controller_that_cannot_start_is_named_with_its_reason_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients got the whole traceback, and then its last line, with the paths of the server's files."""
    monkeypatch.setattr(controller_calls, "RETRY_PAUSE_S", 0.001)
    asked: list[str] = []
    calls = ControllerCalls(lambda: controller_that_dies(asked), timeout_s=0.3)
    with pytest.raises(StoreError) as caught:
        asyncio.run(calls.sessions())
    assert len(asked) > 1
    told = "the cluster controller did not answer sessions in 0.3 s"
    assert str(caught.value) == f"{told} (controllers.errors.StoreError: {REASON})"
    assert error_info(caught.value).message == told
