"""A LocalEngine on its real thread over a NullRunner. Tests can hold the runner at a step or break it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from engine.api import GenerateRequest, TokenDelta
from engine.assembly import assemble_engine
from engine.batch import ModelOutput, ScheduledBatch
from engine.engine import LocalEngine
from engine.settings import (
    BooksCheck,
    CacheSettings,
    ExecutionSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from tests.unit.engine.driver import VOCAB, Outcome
from tests.unit.engine.null_runner import NullRunner

WAIT_S = 20.0
"""How long a test waits for something that must happen at once."""


class GatedRunner(NullRunner):
    """A NullRunner that stops before a step while `hold()` is in force. It raises `fault` for the batches that `breaks`
    chooses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.breaks: Callable[[ScheduledBatch], bool] = lambda _: False
        self.fault: BaseException = RuntimeError("device lost")

    def execute(self, batch: ScheduledBatch) -> ModelOutput:
        self.entered.set()
        assert self.open.wait(WAIT_S)
        if self.breaks(batch):
            raise self.fault
        return super().execute(batch)


class Rig:
    """The engine, its runner and everything that the sink was given. Tests may set `runs_ahead` on the class, for all
    rigs."""

    runs_ahead = False
    decode_steps = 1

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        context_len: int = 256,
        scheduler: SchedulerSettings | None = None,
        books: BooksCheck = "strict",
        host_pages: int = 0,
        disk_pages: int = 0,
        speculation: SpeculationSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        **runner: Any,
    ) -> None:
        runner.setdefault("runs_ahead", self.runs_ahead)
        self.runner = GatedRunner(num_pages, page_size, VOCAB, context_len, **runner)
        page_bytes = self.runner.facts.page_size_bytes
        cache = CacheSettings(
            page_size,
            host_size_bytes=host_pages * page_bytes,
            disk_size_bytes=disk_pages * page_bytes,
            books=books,
        )
        self.engine: LocalEngine = assemble_engine(
            self.runner,
            cache,
            scheduler or SchedulerSettings(64, 16, 8),
            speculation or SpeculationSettings(),
            frozenset({0}),
            self._sink,
            ExecutionSettings(decode_steps=self.decode_steps),
            clock=clock,
        )
        self.outcomes: dict[str, Outcome] = {}
        self.sink_fault: Exception | None = None
        self._news = threading.Condition()

    def submit(self, *specs: GenerateRequest) -> None:
        for spec in specs:
            self.outcomes.setdefault(spec.request_id, Outcome())
            self.engine.submit(spec)

    def wait(self, *request_ids: str) -> list[Outcome]:
        """Waits until all of these requests are answered."""
        self.wait_for(lambda: all(self.outcomes[name].finish is not None for name in request_ids))
        return [self.outcomes[name] for name in request_ids]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits for deliveries to the sink until `condition` holds."""
        with self._news:
            assert self._news.wait_for(condition, WAIT_S), "the engine did not answer"

    def generate(self, spec: GenerateRequest) -> Outcome:
        self.submit(spec)
        return self.wait(spec.request_id)[0]

    def hold(self) -> None:
        """Makes the engine stand still at its next step."""
        self.runner.entered.clear()
        self.runner.open.clear()

    def wait_held(self) -> None:
        assert self.runner.entered.wait(WAIT_S)

    def go_on(self) -> None:
        self.runner.open.set()

    def check(self) -> None:
        report = self.engine.audit().result(WAIT_S)
        assert report.clean, report

    def _sink(self, deltas: Sequence[TokenDelta]) -> None:
        with self._news:
            fault, self.sink_fault = self.sink_fault, None
            if fault is not None:
                raise fault
            for delta in deltas:
                self.outcomes.setdefault(delta.request_id, Outcome()).take(delta)
            self._news.notify_all()


@contextmanager
def running(**options: Any) -> Iterator[Rig]:
    """A started rig. At the end its books are walked, if the engine is still alive, and it is stopped."""
    rig = Rig(**options)
    rig.engine.start()
    try:
        yield rig
        if rig.engine.alive:
            rig.check()
    finally:
        rig.go_on()
        rig.engine.stop(WAIT_S)
