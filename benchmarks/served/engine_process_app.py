"""The application with each engine in a process of its own (`engine_process.py`): with a model, and with the null
runner."""

# No `from __future__ import annotations`: Ray Serve reads the class of `args` from the signature.

from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from ray.serve.deployment import Application

from benchmarks.served.engine_process import EngineFactory, ProcessEngine
from engine.api import DeltaSink, Engine
from engine.settings import EngineSettings
from serving.app import compose
from serving.replica.engine_factory import build_local_engine
from serving.replica.mailbox import Mailbox
from serving.settings.config import AppArgs, parse_args
from tests.cluster.null_app import COUNTS, PACE, STEP_S, null_engine


def beside(make: EngineFactory, settings: EngineSettings, sink: DeltaSink) -> Engine:
    assert isinstance(sink, MethodType)
    mailbox = sink.__self__  # the replica's event loop is known to nothing else here
    assert isinstance(mailbox, Mailbox)
    return ProcessEngine(make, settings, sink, mailbox._loop)


def build(values: dict[str, Any]) -> Application:
    return compose(parse_args(values), partial(beside, build_local_engine))


def never() -> bool:
    return False


def null_of(step_s: float, counts: Path | None, settings: EngineSettings, sink: DeltaSink) -> Engine:
    return null_engine(settings, sink, never, step_s, counts)


def build_null(args: AppArgs) -> Application:
    state_dir = Path(args.controller.state_dir)
    pace, counts = state_dir / PACE, state_dir / COUNTS
    step_s = float(pace.read_text()) if pace.exists() else STEP_S
    make = partial(null_of, step_s, counts if counts.exists() else None)
    return compose(args, partial(beside, make))
