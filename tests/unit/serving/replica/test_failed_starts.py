"""A replica that cannot start ends cleanly, and its own error stays the visible one."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from controllers.errors import NoAnswer
from engine.api import Engine
from engine.assembly import assemble_engine
from engine.models.errors import BadCheckpoint
from engine.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from serving.replica.environment import ReplicaEnvironment
from serving.replica.replica import LLMReplica
from serving.settings.config import AppArgs, parse_args
from serving.text.text import TextProcessor
from tests.unit.engine.null_runner import EOS_TOKEN_ID, NullRunner
from tests.unit.serving.replica_rig import OFF, VOCAB_SIZE, local_controller
from tests.unit.serving.small_tokenizer import byte_level_tokenizer

ARGS = parse_args({"model": {"path": "a-model", "generation_config": "off"}})


class Engines(list[Engine]):
    """The engines that a replica has built."""

    def build(self, _settings: EngineSettings, sink: Callable[..., None]) -> Engine:
        runner = NullRunner(num_pages=16, page_size=4, vocab_size=VOCAB_SIZE, max_context_len=64)
        eos = frozenset({EOS_TOKEN_ID})
        engine = assemble_engine(runner, CacheSettings(books="strict"), SchedulerSettings(), OFF, eos, sink)
        engine.start()
        self.append(engine)
        return engine


async def start_and_end(
    engines: Engines,
    make_environment: Callable[[AppArgs], Awaitable[ReplicaEnvironment]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Starts a replica and ends it as Serve does, also after its start has failed. Raises what the start raises."""
    replica: Any = LLMReplica.__new__(LLMReplica)
    try:
        await replica.__init__(ARGS, engines.build, make_environment)
    finally:
        await replica.__del__()
        # As in Serve's process, nobody collects the replica after its end.
        monkeypatch.delattr(LLMReplica, "__del__")


class Listener:
    """Sockets that nobody connects to."""

    closed = False

    async def close(self) -> None:
        self.closed = True


class Connections:
    """The connections to a controller that is never asked."""

    closed = False

    def close(self) -> None:
        self.closed = True


def environments(
    controller: Any,
    listener: Any,
    load_text: Callable[[ModelSettings, Engine], Any],
    settle: Callable[[], None],
) -> Callable[[AppArgs], Awaitable[ReplicaEnvironment]]:
    """Makes a replica's environment of these parts."""

    async def make(_args: AppArgs) -> ReplicaEnvironment:
        return ReplicaEnvironment(
            "replica-a",
            controller,
            listener,
            publish_gauges=lambda _stats: None,
            load_text=load_text,
            clock=time.monotonic,
            unix_clock=time.time,
            settle=settle,
        )

    return make


async def test_a_replica_that_cannot_load_its_tokenizer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end raised AttributeError before it had closed anything."""
    engines = Engines()
    listener: Any = Listener()
    controller: Any = Connections()

    def load_text(_settings: ModelSettings, _engine: Engine) -> Any:
        raise BadCheckpoint("tokenizer.json is not JSON")

    make_environment = environments(controller, listener, load_text, lambda: None)
    with pytest.raises(BadCheckpoint):
        await start_and_end(engines, make_environment, monkeypatch)
    assert listener.closed
    assert controller.closed
    assert not engines[0].alive
    assert not caplog.records


async def test_a_replica_that_is_in_no_cluster(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is built while the replica looks for its cluster."""
    engines = Engines()

    async def make_environment(_args: AppArgs) -> ReplicaEnvironment:
        raise NoAnswer("the controller does not answer")

    with pytest.raises(NoAnswer):
        await start_and_end(engines, make_environment, monkeypatch)
    assert not engines[0].alive
    assert not caplog.records


class Broken(Exception):
    """Ends a start behind the chat template's first use."""


@pytest.mark.parametrize(
    ("template", "level", "said"),
    [
        ("{% for message in messages %}{{ message.content }", "WARNING", "unexpected '}'"),
        ("{{ raise_exception('only translations') }}", "WARNING", "only translations"),
        (None, "INFO", "no chat template; use /v1/completions"),
    ],
)
async def test_a_start_tells_of_a_chat_template_that_fails(
    template: str | None,
    level: str,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first chat of a user told it: the start wrote its line where nobody sees it."""
    controller: Any = local_controller(tmp_path)
    listener: Any = Listener()

    def load_text(_settings: ModelSettings, _engine: Engine) -> TextProcessor:
        return TextProcessor(byte_level_tokenizer(template), vocab_size=VOCAB_SIZE, max_context_len=64)

    def settle() -> None:
        raise Broken

    make_environment = environments(controller, listener, load_text, settle)
    with caplog.at_level("INFO", "ray.serve"), pytest.raises(Broken):
        await start_and_end(Engines(), make_environment, monkeypatch)
    gc.collect()  # the replica, which has got far enough to be in cycles, while it has no `__del__`
    (record,) = [each for each in caplog.records if each.name == "ray.serve"]
    assert record.levelname == level
    assert record.getMessage().startswith("model a-model: ")
    assert said in record.getMessage()
