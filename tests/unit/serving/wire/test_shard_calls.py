"""Calls to the cluster controller: what a caller gets when it cannot answer, and turns that share a call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayTaskError

from controllers.commit_groups import Outcome
from controllers.errors import StaleEpoch, StoreError
from controllers.records import TurnRecord
from controllers.tokens import encode_tokens
from serving.wire import shard_calls
from serving.wire.errors import error_info
from serving.wire.shard_calls import ShardCalls

REASON = "cannot open session log /var/sessions.sqlite3: disk is full"
TRACEBACK = f"""Traceback (most recent call last):
  File "/srv/kedge/controllers/session_log/sqlite_schema.py", line 82, in open_session_log
controllers.errors.StoreError: {REASON}
"""


def controller_that_dies(times: list[str]) -> ActorHandle:
    async def call() -> Any:
        times.append("asked")
        raise ActorDiedError(RayTaskError("ClusterController.__init__", TRACEBACK, StoreError(REASON)))

    return cast(ActorHandle, SimpleNamespace(replicas=SimpleNamespace(remote=call)))


def test_a_controller_that_cannot_start_is_named_with_its_reason_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clients used to get the whole traceback. Later they got its last line, with the paths of the server's files."""
    monkeypatch.setattr(shard_calls, "RETRY_PAUSE_S", 0.001)
    asked: list[str] = []
    calls = ShardCalls(lambda: controller_that_dies(asked), timeout_s=0.3)
    with pytest.raises(StoreError) as caught:
        asyncio.run(calls.replicas())
    assert len(asked) > 1
    told = "the cluster controller did not answer replicas in 0.3 s"
    assert str(caught.value) == f"{told} (controllers.errors.StoreError: {REASON})"
    assert error_info(caught.value).message == told


def turn(session_id: str) -> TurnRecord:
    return TurnRecord(session_id, 1, 0, 0, encode_tokens([1]), 1)


def test_turns_that_come_while_a_call_is_under_way_share_the_next() -> None:
    """Each turn used to be a call of its own. A call costs the controller several times what a turn does."""

    async def commit_all() -> tuple[list[list[str]], list[Any]]:
        asked: list[list[str]] = []
        answers = asyncio.Event()

        async def commit_turns(records: list[TurnRecord]) -> list[Outcome]:
            asked.append([record.session_id for record in records])
            await answers.wait()
            return [StaleEpoch("moved") if record.session_id == "t" else None for record in records]

        actor = SimpleNamespace(commit_turns=SimpleNamespace(remote=commit_turns))
        calls = ShardCalls(lambda: cast(ActorHandle, actor), timeout_s=20.0)
        tasks = [asyncio.create_task(calls.commit_turn(turn("s")))]
        while not asked:
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(calls.commit_turn(turn(name))) for name in "tuv"]
        await asyncio.sleep(0)
        answers.set()
        return asked, await asyncio.gather(*tasks, return_exceptions=True)

    asked, told = asyncio.run(commit_all())
    assert asked == [["s"], ["t", "u", "v"]]
    assert [type(outcome) for outcome in told] == [type(None), StaleEpoch, type(None), type(None)]
