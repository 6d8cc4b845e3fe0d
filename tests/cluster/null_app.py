"""The application around the null runner: the real engine and cluster, predictable tokens, no model to load."""

# No `from __future__ import annotations`: Ray Serve reads the class of `args` from the signature.

import json
import time
from pathlib import Path
from typing import Any

from ray.serve.deployment import Application

from engine.api import DeltaSink, Engine
from engine.build import assemble_engine
from engine.runner.null import EOS_TOKEN_ID, NullRunner
from engine.settings import EngineSettings
from serving.app import compose
from serving.settings.config import AppArgs

CONTEXT_LEN = 4096
STEP_S = 0.002
HOLD = "hold"


class PacedRunner(NullRunner):
    """Every step takes STEP_S, about as long as a small model's."""

    def execute(self, batch: Any) -> Any:
        time.sleep(STEP_S)
        return super().execute(batch)


def vocab_size_of(model_path: str) -> int:
    return int(json.loads((Path(model_path) / "config.json").read_text())["vocab_size"])


def null_engine(settings: EngineSettings, sink: DeltaSink) -> Engine:
    pages = settings.cache.num_pages or 2048
    runner = PacedRunner(pages, settings.cache.page_size, vocab_size_of(settings.model.path), CONTEXT_LEN)
    return assemble_engine(
        runner, settings.cache, settings.scheduler, settings.speculation, frozenset({EOS_TOKEN_ID}), sink
    )


def build(args: AppArgs) -> Application:
    """A replica does not start while there is a file HOLD in the state directory."""
    hold = Path(args.controller.state_dir) / HOLD

    def once_it_may(settings: EngineSettings, sink: DeltaSink) -> Engine:
        while hold.exists():
            time.sleep(STEP_S)
        return null_engine(settings, sink)

    return compose(args, once_it_may)
