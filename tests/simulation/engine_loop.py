"""A replica's engine on the replica's event loop. Steps take virtual time; the seed decides when copies end."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from engine.api import DeltaSink
from engine.assembly import assemble_engine
from engine.engine import LocalEngine
from engine.settings import EngineSettings
from engine.step_thread import StepLoop
from tests.simulation.loop import PartyLoop
from tests.unit.engine.null_runner import EOS_TOKEN_ID, NullRunner

VOCAB_SIZE = 50_021
CONTEXT_LEN = 4096
EOS_PROBABILITY = 0.05
STEP_S = (0.0005, 0.01)
COPY_S = (0.0, 0.05)


class LoopDriver:
    """A StepDriver that cranks on an event loop. A step takes STEP_S times `slowness`. `stall` delays the end of the
    next step. While `disk_fails` is set, copies to and from disk fail."""

    def __init__(self, loop: PartyLoop, random: Random, runner: NullRunner, slowness: float) -> None:
        self._slowness = slowness
        self._loop = loop
        self._random = random
        self._runner = runner
        self._engine: StepLoop | None = None
        self._timer: Any = None
        self._copying = False
        self._stalled_until_s = 0.0
        self.disk_fails = False
        self.alive = False

    @property
    def started(self) -> bool:
        return self._engine is not None

    def start(self, loop: StepLoop) -> None:
        self._engine = loop
        self.alive = True
        self.wake()

    def stall(self, for_s: float) -> None:
        self._stalled_until_s = self._loop.time() + for_s

    def wake(self) -> None:
        if self._timer is None and self.alive:
            step_s = self._random.uniform(*STEP_S) * self._slowness
            due_s = max(self._loop.time() + step_s, self._stalled_until_s)
            self._timer = self._loop.call_at(due_s, self._crank)

    def join(self, timeout_s: float) -> None:
        assert self._engine is not None
        if self._loop.time() + timeout_s < self._stalled_until_s:
            raise TimeoutError("the step does not end")
        while self.alive:
            self._crank()

    def _crank(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.alive:
            return
        assert self._engine is not None
        self.alive = self._engine.crank(wait=False)
        if self.alive and not self._engine.idle:
            self.wake()
        self._copy()

    def _copy(self) -> None:
        """Lets copies end one by one, beside the steps."""
        if not self._copying and (self._runner._copies or self._runner._disk_copies):
            self._copying = True
            self._loop.call_later(self._random.uniform(*COPY_S), self._end_copy)

    def _end_copy(self) -> None:
        self._copying = False
        if self._runner._copies:
            self._runner.end_copies()
        else:
            self._runner.end_disk_copies(1, OSError("the disk does not work") if self.disk_fails else None)
        self._copy()


class EngineFactory:
    """The factory with which LLMReplica builds its engine. `tiers` are the pages in host memory and on disk. For
    `slowness` see LoopDriver."""

    def __init__(self, loop: PartyLoop, random: Random, tiers: tuple[int, int], slowness: float) -> None:
        self._slowness = slowness
        self._loop = loop
        self._random = random
        self._tiers = tiers
        self.driver: LoopDriver | None = None

    def __call__(self, settings: EngineSettings, sink: DeltaSink) -> LocalEngine:
        cache = settings.cache
        assert cache.num_pages is not None
        runner = NullRunner(
            cache.num_pages,
            cache.page_size,
            VOCAB_SIZE,
            CONTEXT_LEN,
            eos_probability=EOS_PROBABILITY,
            copies_wait=True,
        )
        page_bytes = runner.facts.page_size_bytes
        host_bytes, disk_bytes = (pages * page_bytes for pages in self._tiers)
        cache = replace(cache, host_size_bytes=host_bytes, disk_size_bytes=disk_bytes)
        self.driver = LoopDriver(self._loop, self._random, runner, self._slowness)
        return assemble_engine(
            runner,
            cache,
            settings.scheduler,
            settings.speculation,
            frozenset({EOS_TOKEN_ID}),
            sink,
            driver=self.driver,
            clock=self._loop.time,
        )
