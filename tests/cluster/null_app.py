"""The application with the null runner: the real engine and cluster, predictable tokens, no model to load."""

# No `from __future__ import annotations`: Ray Serve reads the class of `args` from the signature.

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ray.serve.deployment import Application

from engine.api import DeltaSink, Engine
from engine.assembly import assemble_engine
from engine.settings import EngineSettings
from serving.app import compose
from serving.settings.config import AppArgs
from tests.unit.engine.null_runner import EOS_TOKEN_ID, NullRunner

CONTEXT_LEN = 4096
STEP_S = 0.002
HOLD = "hold"
HANG = "hang"
PACE = "pace"
COUNTS = "counts"
COUNTED_EVERY = 50


class PacedRunner(NullRunner):
    """A runner whose steps take `step_s` (may be 0) and do not end while `hangs` is true. STEP_S is about the step time
    of a small model. The runner writes to `counts` the number of steps, the number of their items, and the CPU time of
    the engine's thread."""

    def __init__(
        self, hangs: Callable[[], bool], step_s: float, counts: Path | None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._hangs = hangs
        self._step_s = step_s
        self._counts = counts
        self._num_steps = self._num_items = 0

    def execute(self, batch: Any) -> Any:
        self._num_steps += 1
        self._num_items += len(batch.items)
        if self._counts is not None and self._num_steps % COUNTED_EVERY == 0:
            fresh = self._counts.with_suffix(".new")
            fresh.write_text(json.dumps([self._num_steps, self._num_items, time.thread_time()]))
            fresh.replace(self._counts)
        if self._step_s:
            time.sleep(self._step_s)
        while self._hangs():
            time.sleep(STEP_S)
        return super().execute(batch)


def vocab_size_of(model_path: str) -> int:
    return int(json.loads((Path(model_path) / "config.json").read_text())["vocab_size"])


def hangs_here(sign: Path) -> bool:
    """Whether the file names this process."""
    return sign.exists() and sign.read_text() == str(os.getpid())


def null_engine(
    settings: EngineSettings,
    sink: DeltaSink,
    hangs: Callable[[], bool],
    step_s: float,
    counts: Path | None,
) -> Engine:
    pages = settings.cache.num_pages or 2048
    runner = PacedRunner(
        hangs,
        step_s,
        counts,
        pages,
        settings.cache.page_size,
        vocab_size_of(settings.model.path),
        CONTEXT_LEN,
        poison=settings.cache.books != "off",  # without it a step costs only what it costs the engine
    )
    return assemble_engine(
        runner, settings.cache, settings.scheduler, settings.speculation, frozenset({EOS_TOKEN_ID}), sink
    )


def build(args: AppArgs) -> Application:
    """Builds the application. Files in the state directory control it. HOLD keeps replicas from starting. HANG keeps
    the steps of one replica from ending; it has the replica's process id. PACE has the duration of a step in seconds.
    COUNTS, if it exists, is kept up to date by the replica; use it with one replica only."""
    state_dir = Path(args.controller.state_dir)
    hold, hang, pace, counts = (state_dir / name for name in (HOLD, HANG, PACE, COUNTS))

    def once_it_may(settings: EngineSettings, sink: DeltaSink) -> Engine:
        while hold.exists():
            time.sleep(STEP_S)
        step_s = float(pace.read_text()) if pace.exists() else STEP_S
        return null_engine(
            settings, sink, partial(hangs_here, hang), step_s, counts if counts.exists() else None
        )

    return compose(args, once_it_may)
