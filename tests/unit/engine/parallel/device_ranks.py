"""Runs the GPU's runner as a rank on a CPU: fixed buffers, padding and steps launched ahead, but no captured graphs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from engine.api import GenerateRequest, TokenDelta
from engine.assembly import assemble_engine
from engine.attention.choose import choose_attention
from engine.build_runner import StepLimits, careful_runner, device_runner
from engine.models.loader import load_model
from engine.parallel.lead import lead
from engine.parallel.local_ranks import HOST, LocalRanks
from engine.parallel.ranks import OneRank, RankGroup
from engine.parallel.team import gather_team
from engine.runner.graphs import NoGraphs
from engine.runner.kv_pool import make_kv_pool
from engine.runner.protocol import Runner
from engine.settings import EngineSettings
from tests.unit.engine.driver import Outcome


def make_device_runner(settings: EngineSettings, ranks: RankGroup) -> Runner:
    loaded, execution = load_model(settings.model, ranks=ranks), settings.execution
    pool = make_kv_pool(loaded.layout, settings.cache, loaded.dtype, loaded.device)
    choice = choose_attention("torch", pool, loaded.device)
    limits = StepLimits.of(settings.scheduler, execution, settings.speculation.max_draft_tokens)
    careful = careful_runner(loaded, pool, choice, None, execution)
    runner = device_runner(loaded, careful, pool, choice, limits, NoGraphs(), execution, ranks)
    runner.capture()
    return runner


def answers(settings: EngineSettings, requests: Sequence[GenerateRequest]) -> list[Outcome]:
    """The answers of an engine with as many ranks as `settings` say. All ranks but the first run in child processes."""
    outcomes = {request.request_id: Outcome() for request in requests}
    news = threading.Condition()

    def sink(deltas: Sequence[TokenDelta]) -> None:
        with news:
            for delta in deltas:
                outcomes[delta.request_id].take(delta)
            news.notify_all()

    size = settings.execution.tensor_parallel
    if size == 1:
        runner = make_device_runner(settings, OneRank())
    else:
        team = gather_team(size, HOST, torch.device("cpu"), LocalRanks(settings, make_device_runner))
        runner = lead(make_device_runner(settings, team.ranks), team)
    engine = assemble_engine(
        runner,
        settings.cache,
        settings.scheduler,
        settings.speculation,
        frozenset(),
        sink,
        settings.execution,
    )
    engine.start()
    try:
        for request in requests:
            engine.submit(request)
        with news:
            assert news.wait_for(lambda: all(o.finish is not None for o in outcomes.values()), 30.0)
    finally:
        engine.stop(30.0)
    return list(outcomes.values())
