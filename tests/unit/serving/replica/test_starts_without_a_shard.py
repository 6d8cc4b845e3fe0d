"""A replica that starts while a shard of the controller is away already serves the sessions of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import NoAnswer
from controllers.records import ReplicaAddress
from engine.api import Engine
from engine.assembly import assemble_engine
from engine.settings import CacheSettings, EngineSettings, SchedulerSettings
from serving.replica.environment import ReplicaEnvironment
from serving.replica.replica import LLMReplica
from serving.settings.config import AppArgs, parse_args
from serving.text.text import TextProcessor
from serving.wire import controller_calls
from serving.wire.controller_calls import ControllerCalls
from serving.wire.peer_sockets import PeerSockets
from tests.unit.engine.null_runner import EOS_TOKEN_ID, NullRunner
from tests.unit.serving.replica_rig import OFF, VOCAB_SIZE, WAIT_S, LocalController, local_controller

ARGS = parse_args(
    {
        "model": {"path": "a-model", "generation_config": "off"},
        "controller": {"shards": 2, "heartbeat_interval_s": 0.1},
    }
)


class Shard:
    """A shard of the controller. While it is `away`, its calls end as those that it does not answer."""

    def __init__(self, directory: Path, *, away: bool) -> None:
        directory.mkdir()
        self.local: LocalController = local_controller(directory)
        self.away = away
        self.heard = asyncio.Event()
        """Set by the first heartbeat that it takes."""

    def close(self) -> None:
        pass

    async def announce(self) -> None:
        self._answers()

    async def heartbeat(self, *report: Any) -> Any:
        self._answers()
        self.heard.set()
        return await self.local.heartbeat(*report)

    def _answers(self) -> None:
        if self.away:
            raise NoAnswer("the shard is away")

    def __getattr__(self, name: str) -> Any:
        self._answers()
        return getattr(self.local, name)


class EndedByHand(LLMReplica):
    """A replica that the test ends, as Serve does."""

    end = LLMReplica.__del__

    def __del__(self) -> Any:
        """Does nothing, so that the garbage collector does not end it once more."""


def build_engine(_settings: EngineSettings, sink: Callable[..., None]) -> Engine:
    runner = NullRunner(num_pages=16, page_size=4, vocab_size=VOCAB_SIZE, max_context_len=64)
    eos = frozenset({EOS_TOKEN_ID})
    return assemble_engine(runner, CacheSettings(books="strict"), SchedulerSettings(), OFF, eos, sink)


def environment_with(shards: list[Shard]) -> ReplicaEnvironment:
    calls: Any = shards
    make_address = partial(ReplicaAddress, actor="r", namespace="serve")
    return ReplicaEnvironment(
        "replica-a",
        ControllerCalls(calls),
        PeerSockets("127.0.0.1", (), node_id="n1", make_address=make_address),
        publish_gauges=lambda _stats: None,
        load_text=lambda _model, engine: TextProcessor(
            None, vocab_size=engine.vocab_size, max_context_len=engine.max_context_len
        ),
        clock=time.monotonic,
        unix_clock=time.time,
        settle=lambda: None,
    )


async def test_shards_that_answer_hear_of_a_replica_that_waits_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It registered at them again and again, sent no heartbeats, and lost each time what they had given it."""
    monkeypatch.setattr(controller_calls, "START_PAUSE_S", 0.01)
    shards = [Shard(tmp_path / "0", away=False), Shard(tmp_path / "1", away=True)]

    async def make_environment(_args: AppArgs) -> ReplicaEnvironment:
        return environment_with(shards)

    replica: Any = EndedByHand.__new__(EndedByHand)
    starting = asyncio.create_task(replica.__init__(ARGS, build_engine, make_environment))
    try:
        async with asyncio.timeout(WAIT_S):
            await shards[0].heard.wait()
            assert not starting.done(), "Ray Serve counts on it only once all of the controller does"
            shards[1].away = False
            await starting
            await shards[1].heard.wait()
        for shard in shards:
            assert [status.replica_id for status in await shard.local.replicas()] == ["replica-a"]
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await replica.end()
