"""Turns that are committed over a connection to a real controller actor, which is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.actor import ActorHandle

from controllers.cluster_actor import get_or_create_controller
from controllers.commit_groups import Outcome
from controllers.errors import StaleEpoch
from controllers.records import Assignment, ReplicaStatus, TurnRecord
from controllers.settings import ClusterSettings, SqliteLogSettings
from controllers.tokens import encode_tokens, unpack_tokens
from serving.wire.commit_server import serve_commits
from serving.wire.shard_calls import ShardCalls

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray")]

NAMESPACE = "commit-connection-test"
WAIT_S = 30.0
TURNS = 40


def kill_by_ray(handle: ActorHandle) -> None:
    ray.kill(handle, no_restart=False)


def kill_by_signal(handle: ActorHandle) -> None:
    os.kill(int(ray.get(handle.__ray_call__.remote(lambda _: os.getpid()))), signal.SIGKILL)


class Session:
    """A session whose turns have one token each."""

    def __init__(self, calls: ShardCalls, owner: Assignment) -> None:
        self._calls = calls
        self._owner = owner
        self.tokens: list[int] = []

    async def turn(self, epoch: int | None = None) -> None:
        token, at = random.randrange(1000), len(self.tokens)
        record = TurnRecord(
            self._owner.session_id, epoch or self._owner.epoch, at, at, encode_tokens([token]), 1
        )
        await self._calls.commit_turn(record)
        self.tokens.append(token)

    async def logged(self) -> list[int]:
        record = await self._calls.load_session(
            self._owner.session_id, self._owner.epoch, self._owner.replica_id
        )
        return list(unpack_tokens(record.history).tolist())


@pytest.mark.parametrize("node", ["same", "another"])
def test_turns_pass_the_actor_by_and_none_is_lost_when_it_is_killed(tmp_path: Path, node: str) -> None:
    """On another node the connection is encrypted TCP."""
    log = SqliteLogSettings(str(tmp_path / "sessions.db"))

    def connect() -> ActorHandle:
        return get_or_create_controller(
            tmp_path.name, NAMESPACE, ClusterSettings(replica_timeout_s=60.0), log, serve_commits
        )

    async def run() -> None:
        here = ray.get_runtime_context().get_node_id()
        calls = ShardCalls(connect, timeout_s=WAIT_S, node_id=here if node == "same" else "elsewhere")
        try:
            await calls.register_replica(ReplicaStatus("a", 10**6, 10**6))
            session = Session(calls, await calls.open_session("s", ""))
            for kill in (kill_by_signal, kill_by_ray):
                await until_open(calls, session)
                await without_the_actor(calls, session)
                await while_killed(session, partial(kill, connect()))
            with pytest.raises(StaleEpoch):
                await session.turn(epoch=7)
            assert await session.logged() == session.tokens
        finally:
            calls.close()

    asyncio.run(run())
    ray.kill(connect())


async def until_open(calls: ShardCalls, session: Session) -> None:
    assert calls._connection is not None
    async with asyncio.timeout(WAIT_S):
        while not calls._connection.is_open:
            await session.turn()


async def without_the_actor(calls: ShardCalls, session: Session) -> None:
    async def refuse(_records: Sequence[TurnRecord]) -> list[Outcome]:
        raise AssertionError("the actor was called")

    every: Any = calls
    every._commit_turns = refuse
    for _ in range(TURNS):
        await session.turn()
    del every._commit_turns


async def while_killed(session: Session, kill: Callable[[], None]) -> None:
    killing = asyncio.create_task(asyncio.to_thread(kill))
    while not killing.done():
        await session.turn()
    await killing
    for _ in range(TURNS):
        await session.turn()
