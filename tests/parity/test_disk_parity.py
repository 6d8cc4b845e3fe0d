"""P1 and P2 for sessions that move from the device to host memory, to disk and back, with a real model and real
files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.assembly import assemble_engine
from engine.build_runner import build_runner
from engine.engine import LocalEngine
from engine.settings import CacheSettings, SchedulerSettings, SpeculationSettings
from tests.parity.schedules import Finished
from tests.parity.test_matrix import WINDOW, Models, make_models
from tests.parity.test_schedules import assert_greedy

SESSIONS = 12
TURNS = 3
PAGE_SIZE = 4
NUM_PAGES = 16
HOST_PAGES = {None: 56, WINDOW: 16}
"""Host pages by window. In layers with a window a session keeps only what the window sees."""
DISK_PAGES = 400
WINDOW_RATIO = 1.25
"""Steps of the runner for GPUs need two pages more than the pool has."""
LIMITS = SchedulerSettings(max_batch_tokens=48, chunk_size=8, max_running=4)


class Rig:
    """An engine stepped by hand. Its pool holds one session at its end; host memory holds three more and one that is on
    its way. No step begins while a write is in progress, because a session that finds no room meanwhile goes to the
    log. Each turn ends, with all copies that it caused, before the next turn begins."""

    def __init__(self, models: Models, disk: Path, window: int | None = None) -> None:
        settings = CacheSettings(
            PAGE_SIZE,
            NUM_PAGES,
            prefix_cache=False,
            window_ratio=WINDOW_RATIO,
            books="strict",
            disk_size_bytes=1,
            disk_path=str(disk),
        )
        self.runner = build_runner(models.target, settings, scheduler=LIMITS)
        page_bytes = self.runner.facts.page_size_bytes + self.runner.facts.window_page_size_bytes
        settings = replace(
            settings,
            host_size_bytes=HOST_PAGES[window] * page_bytes,
            disk_size_bytes=DISK_PAGES * page_bytes,
        )
        self.engine: LocalEngine = assemble_engine(
            self.runner, settings, LIMITS, SpeculationSettings(), frozenset(), self._take
        )
        self.tiers = self.engine._cache.tiers
        self.folder = Path(str(self.runner.describe()["disk"]))
        self.histories: dict[str, list[int]] = {f"s{number}": [] for number in range(SESSIONS)}
        self.finished: list[Finished] = []
        self.cached: list[int] = []
        self._output: list[int] = []
        self._ended = False

    def turn(self, name: str, new_tokens: list[int]) -> None:
        history = self.histories[name]
        spec = GenerateRequest(
            f"{name}/{len(history)}", new_tokens, SamplingParams(6, temperature=0.0),
            history=history, history_len=len(history), session_id=name,
        )  # fmt: skip
        self._output, self._ended = [], False
        self.engine.submit(spec)
        while not self._ended or self.engine._cache.awaits_copies:
            idle = self._ended or self.engine._stalled
            self.engine._drain_inbox(block=idle)
            self._end_writes()
            self.engine.step()
        self._end_writes()
        prompt = [*history, *new_tokens]
        self.histories[name] = prompt + self._output
        self.finished.append(Finished(self.histories[name], len(prompt), spec.request_id))

    def _end_writes(self) -> None:
        while self.tiers._write is not None:
            self.engine._copies.carry_out()
            self.engine._drain_inbox(block=True)

    def all_turns(self) -> None:
        for number, name in enumerate(self.histories):
            self.turn(name, [3 + (7 * number + len(self.histories[name]) + k) % 20 for k in range(9)])

    def close(self) -> None:
        """Closes everything. Every page, host byte and file must have been freed."""
        for name in self.histories:
            self.engine.close_session(name)
        self.engine._drain_inbox(block=False)
        self.engine.flush()
        self.engine._drain_inbox(block=False)
        self.engine.step()
        report = self.engine._cache.books.audit()
        assert report.clean, report
        assert all(accounts.free == accounts.total for accounts in report.pools.values()), report
        assert report.host.used_bytes == report.disk.used_bytes == 0
        self.runner.close()
        assert not self.folder.exists()

    def _take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            self._output += delta.token_ids
            self._ended = delta.finish is not None
            if delta.finish is not None:
                self.cached.append(delta.cached_tokens)


@pytest.mark.parametrize("window", [None, WINDOW], ids=["full", "windowed"])
def test_sessions_go_to_disk_and_back_exactly(
    window: int | None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = make_models(window, tmp_path_factory)
    rig = Rig(models, tmp_path, window)
    for _ in range(TURNS):
        rig.all_turns()
    assert len(list(rig.folder.glob("*.kv"))) >= SESSIONS // 2
    assert rig.cached == [0] * SESSIONS + [14] * SESSIONS + [29] * SESSIONS, "nothing was computed twice"
    assert_greedy(models.reference, rig.finished)
    tiers = rig.tiers
    assert (tiers.num_to_log, tiers.num_disk_failures) == (0, 0)
    assert tiers.num_from_disk >= SESSIONS
    rig.close()


def damage(folder: Path) -> None:
    for file in folder.glob("*.kv"):
        os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize("fault", [damage, partial(shutil.rmtree, ignore_errors=True)], ids=["read", "write"])
def test_a_disk_that_fails_costs_time_not_tokens(
    fault: Callable[[Path], None], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Either all files are cut short, so that reads fail, or the folder is gone, so that writes fail too."""
    models = make_models(None, tmp_path_factory)
    rig = Rig(models, tmp_path)
    rig.all_turns()
    rig.all_turns()
    fault(rig.folder)
    rig.all_turns()
    assert rig.tiers.num_disk_failures >= 4
    assert rig.tiers.num_to_log >= rig.tiers.num_disk_failures
    assert_greedy(models.reference, rig.finished)
    rig.close()
