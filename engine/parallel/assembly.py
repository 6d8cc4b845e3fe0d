"""Puts an engine over several ranks together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from engine.api import DeltaSink
from engine.build import assemble_engine
from engine.build_runner import build_runner
from engine.device import resolve_device
from engine.engine import LocalEngine
from engine.models.errors import UnsupportedModel
from engine.models.loader import LoadedModel, load_model
from engine.models.ops import choose_ops
from engine.parallel.lead import lead
from engine.parallel.local_ranks import HOST, LocalRanks
from engine.parallel.ranks import RankGroup
from engine.parallel.shared_logits import SharedLogits
from engine.parallel.team import RankStarter, gather_team
from engine.parallel.ticket import Timeouts
from engine.runner.protocol import Runner
from engine.settings import EngineSettings

STOP_S = 5.0


def make_runner(settings: EngineSettings, ranks: RankGroup) -> Runner:
    """One rank's runner over its share of the model. Every rank calls it at the same time."""
    return _make_rank(settings, ranks)[0]


def build_parallel_engine(
    settings: EngineSettings,
    sink: DeltaSink,
    start: RankStarter | None = None,
    host: str = HOST,
    timeouts: Timeouts | None = None,
) -> LocalEngine:
    """An engine of `settings.execution.tensor_parallel` ranks, not started; this process is rank 0.

    `start` starts the others, which reach this one at `host`; without it they are child processes here. Raises what
    build_engine raises, or RanksNotStarted. When a rank is lost the engine stops.
    """
    starter = start or LocalRanks(settings, make_runner)
    size, device = settings.execution.tensor_parallel, resolve_device(settings.model.device)
    team = gather_team(size, host, device, starter, timeouts)
    try:
        runner, loaded = _make_rank(settings, team.ranks)
        engine = assemble_engine(
            lead(runner, team),
            settings.cache,
            settings.scheduler,
            settings.speculation,
            loaded.eos_token_ids,
            sink,
            settings.execution,
        )
    except BaseException:
        team.close()
        raise
    team.when_lost(_stopper(engine))
    return engine


def _make_rank(settings: EngineSettings, ranks: RankGroup) -> tuple[Runner, LoadedModel]:
    """As build_engine makes its runner, but for the ranks."""
    speculation = settings.speculation
    loaded = load_model(settings.model, ops=choose_ops(resolve_device(settings.model.device)), ranks=ranks)
    draft = None
    if speculation.method == "draft":
        if speculation.draft_model is None:
            raise UnsupportedModel("speculation with a draft model needs draft_model")
        whole = load_model(speculation.draft_model)
        draft = replace(whole, model=SharedLogits(whole.model, ranks))
    runner = build_runner(
        loaded,
        settings.cache,
        draft,
        scheduler=settings.scheduler,
        execution=settings.execution,
        num_drafts=speculation.max_draft_tokens if speculation.method != "off" else 0,
        ranks=ranks,
    )
    return runner, loaded


def _stopper(engine: LocalEngine) -> Callable[[], None]:
    """Stops the engine on a thread of its own: whoever notices a loss may be the engine's own thread."""

    def stop() -> None:
        engine.stop(STOP_S)

    return lambda: threading.Thread(target=stop, name="kedge-engine-stop", daemon=True).start()
