"""Engines of several processes over a small random model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.api import Engine, GenerateRequest, TokenDelta
from engine.build import build_engine, build_parallel_engine
from engine.build_runner import make_runner
from engine.parallel.local_ranks import HOST, LocalRanks
from engine.parallel.protocol import Timeouts
from engine.settings import CacheSettings, EngineSettings, ExecutionSettings, ModelSettings, SchedulerSettings
from tests.unit.engine.driver import Outcome

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WAIT_S = 30.0


def write_model(directory: Path, **changes: Any) -> ModelSettings:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return ModelSettings(str(directory), load_format="dummy", device="cpu", num_threads=1)


class ParallelRig:
    """An engine of `size` ranks and the outcomes of its requests. All ranks but the first run in child processes."""

    def __init__(
        self,
        model: ModelSettings,
        size: int,
        *,
        cache: CacheSettings | None = None,
        scheduler: SchedulerSettings | None = None,
        timeouts: Timeouts | None = None,
        **settings: Any,
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._news = threading.Condition()
        everything = EngineSettings(
            model,
            cache or CacheSettings(4, 1200, books="strict"),
            scheduler or SchedulerSettings(64, 16, 8),
            execution=ExecutionSettings(tensor_parallel=size),
            **settings,
        )
        self.ranks = LocalRanks(everything, make_runner)
        self.engine: Engine
        if size == 1:
            self.engine = build_engine(everything, self._sink)
        else:
            self.engine = build_parallel_engine(everything, self._sink, self.ranks, HOST, timeouts)
        self.engine.start()

    def submit(self, *specs: GenerateRequest) -> None:
        for spec in specs:
            self.outcomes[spec.request_id] = Outcome()
            self.engine.submit(spec)

    def wait(self, *names: str, timeout_s: float = WAIT_S) -> list[Outcome]:
        with self._news:
            answered = self._news.wait_for(
                lambda: all(self.outcomes[name].finish is not None for name in names), timeout_s
            )
            assert answered, "the engine did not answer"
        return [self.outcomes[name] for name in names]

    def wait_tokens(self, name: str, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.outcomes[name].token_ids) >= count, WAIT_S)

    def generate(self, *specs: GenerateRequest) -> list[Outcome]:
        self.submit(*specs)
        return self.wait(*(spec.request_id for spec in specs))

    def stop(self) -> None:
        self.engine.stop(WAIT_S)
        for child in self.ranks.children:
            eventually(lambda child=child: child.ended() is not None)  # type: ignore[misc]

    def _sink(self, deltas: Sequence[TokenDelta]) -> None:
        with self._news:
            for delta in deltas:
                self.outcomes[delta.request_id].take(delta)
            self._news.notify_all()


def eventually(condition: Any, timeout_s: float = WAIT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.01)
