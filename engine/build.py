"""Composition root: puts an engine together from its settings. Nothing else in the engine knows all the parts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.api import DeltaSink
from engine.assembly import assemble_engine
from engine.build_runner import make_rank, make_runner
from engine.device import resolve_device
from engine.engine import LocalEngine
from engine.models.loader import LoadedModel
from engine.parallel.lead import lead
from engine.parallel.local_ranks import HOST, LocalRanks
from engine.parallel.protocol import Timeouts
from engine.parallel.ranks import OneRank
from engine.parallel.team import RankStarter, gather_team
from engine.runner.protocol import Runner
from engine.settings import EngineSettings

STOP_S = 5.0


def build_engine(settings: EngineSettings, sink: DeltaSink) -> LocalEngine:
    """An engine with the settings' model, not started. Its other ranks are child processes of this one.

    Raises engine.models.errors.ModelError, engine.device.DeviceUnavailable, engine.memory.MemoryShort,
    engine.settings.PoolTooSmall, engine.attention.interface.AttentionUnavailable,
    engine.runner.disk_folder.DiskUnavailable, or engine.parallel.protocol.RanksNotStarted.
    """
    if settings.execution.tensor_parallel > 1:
        return build_parallel_engine(settings, sink)
    runner, loaded = make_rank(settings, OneRank())
    return _engine(runner, loaded, settings, sink)


def build_parallel_engine(
    settings: EngineSettings,
    sink: DeltaSink,
    start: RankStarter | None = None,
    host: str = HOST,
    timeouts: Timeouts | None = None,
) -> LocalEngine:
    """An engine of `settings.execution.tensor_parallel` ranks, not started; this process is rank 0.

    `start` starts the other ranks, which connect to this one at `host`; without it they are child processes of this
    one. Raises what build_engine raises. The engine stops when a rank is lost.
    """
    starter = start or LocalRanks(settings, make_runner)
    size, device = settings.execution.tensor_parallel, resolve_device(settings.model.device)
    team = gather_team(size, host, device, starter, timeouts)
    try:
        runner, loaded = make_rank(settings, team.ranks)
        engine = _engine(lead(runner, team), loaded, settings, sink)
    except BaseException:
        team.close()
        raise
    team.when_lost(_stopper(engine))
    return engine


def _engine(runner: Runner, loaded: LoadedModel, settings: EngineSettings, sink: DeltaSink) -> LocalEngine:
    return assemble_engine(
        runner,
        settings.cache,
        settings.scheduler,
        settings.speculation,
        loaded.eos_token_ids,
        sink,
        settings.execution,
    )


def _stopper(engine: LocalEngine) -> Callable[[], None]:
    """Returns a function that stops the engine on a separate thread, since the engine's own thread may be the one that
    notices a loss."""

    def stop() -> None:
        engine.stop(STOP_S)

    return lambda: threading.Thread(target=stop, name="kedge-engine-stop", daemon=True).start()
