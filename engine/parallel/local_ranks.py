"""Ranks as child processes on this machine: for one host without Ray, and for tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.context import SpawnProcess

from engine.parallel.follow import RunnerMaker, run_rank
from engine.parallel.protocol import Ticket
from engine.parallel.team import RankProcess
from engine.settings import EngineSettings

HOST = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class ChildRank:
    """A RankProcess."""

    def __init__(self, process: SpawnProcess) -> None:
        self._process = process

    def ended(self) -> str | None:
        status = self._process.exitcode
        return None if status is None else f"exit status {status}"

    def kill(self) -> None:
        self._process.kill()


class LocalRanks:
    """A RankStarter. Rank r uses the r-th GPU that this process sees, if the ranks run on GPUs."""

    def __init__(self, settings: EngineSettings, make_runner: RunnerMaker) -> None:
        self._settings = settings
        self._make_runner = make_runner
        self.children: list[ChildRank] = []

    def __call__(self, tickets: Sequence[Ticket]) -> Sequence[RankProcess]:
        context = multiprocessing.get_context("spawn")
        for ticket in tickets:
            process = context.Process(
                target=_run,
                args=(ticket, self._settings, self._make_runner),
                name=f"kedge-rank-{ticket.rank}",
                daemon=True,
            )
            process.start()
            self.children.append(ChildRank(process))
        return self.children


def _run(ticket: Ticket, settings: EngineSettings, make_runner: RunnerMaker) -> None:
    """Runs in the child, before anything has looked for GPUs."""
    if (gpu := gpu_of_rank(ticket.rank, ticket.size, os.environ.get(VISIBLE))) is not None:
        os.environ[VISIBLE] = gpu
    run_rank(ticket, settings, make_runner)


def gpu_of_rank(rank: int, size: int, visible: str | None) -> str | None:
    """Returns a rank's CUDA_VISIBLE_DEVICES, given its parent's (None: unset); None if the rank keeps its parent's. An
    empty value hides all GPUs from every rank."""
    gpus = [str(index) for index in range(size)] if visible is None else visible.split(",")
    return gpus[rank] if rank < len(gpus) and gpus[rank] else None
