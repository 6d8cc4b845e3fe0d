"""An engine with a real model and real files, on a disk that accepts no more."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.api import GenerateRequest, SamplingParams, TokenDelta
from engine.build import build_engine
from engine.engine import LocalEngine
from engine.settings import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from tests.unit.engine.tiny_llama import TINY_LLAMA

WAIT_S = 20.0
PAGE_BYTES = 2 * 2 * 16 * 4 * 4
SESSIONS = 8


@contextmanager
def engine_of(model: Path, disk: Path | None) -> Iterator[tuple[LocalEngine, queue.SimpleQueue[TokenDelta]]]:
    """An engine whose pool holds one and a half sessions. The host holds the others' first turns, the disk all
    sessions."""
    deltas: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()

    def sink(news: Sequence[TokenDelta]) -> None:
        for delta in news:
            deltas.put(delta)

    cache = CacheSettings(
        4, 10, prefix_cache=False, books="strict", host_size_bytes=5 * 6 * PAGE_BYTES,
        disk_size_bytes=1000 * PAGE_BYTES if disk else 0, disk_path=str(disk) if disk else None,
    )  # fmt: skip
    settings = EngineSettings(
        ModelSettings(str(model), load_format="dummy", device="cpu"), cache, SchedulerSettings(64, 16, 4)
    )
    engine = build_engine(settings, sink)
    engine.start()
    try:
        yield engine, deltas
        report = engine.audit().result(WAIT_S)
        assert report.clean, report
    finally:
        engine.stop(WAIT_S)


def turn(
    engine: LocalEngine, deltas: queue.SimpleQueue[TokenDelta], name: str, history: list[int]
) -> tuple[list[int], int]:
    """Runs the session's next turn after all copies have ended. Returns the whole history and how much of it was
    cached."""
    tiers = engine._cache.tiers
    while engine._call(lambda: tiers._write is not None or tiers.awaits_copies).result(WAIT_S):
        pass
    new = [1 + (7 * len(name) + ord(name[-1]) + len(history) + k) % 40 for k in range(8)]
    engine.submit(
        GenerateRequest(
            f"{name}/{len(history)}",
            new,
            SamplingParams(4, temperature=0.0, ignore_eos=True),
            history=history,
            history_len=len(history),
            session_id=name,
        )
    )
    tokens = [*history, *new]
    while True:
        delta = deltas.get(timeout=WAIT_S)
        tokens += delta.token_ids
        if delta.finish is not None:
            assert delta.finish.error is None
            return tokens, delta.cached_tokens


def two_rounds(
    engine: LocalEngine, deltas: queue.SimpleQueue[TokenDelta]
) -> tuple[list[list[int]], list[int]]:
    histories: dict[str, list[int]] = {f"s{number}": [] for number in range(SESSIONS)}
    cached = []
    for _ in range(2):
        for name in histories:
            histories[name], count = turn(engine, deltas, name, histories[name])
            cached.append(count)
    return list(histories.values()), cached


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY_LLAMA))
    return tmp_path / "model"


def test_a_disk_that_takes_nothing_costs_no_session_what_the_host_has_of_it(
    model: Path, tmp_path: Path
) -> None:
    """The disk's folder is gone. Sessions do as well as without a disk."""
    with engine_of(model, None) as (engine, deltas):
        expected, cached_without = two_rounds(engine, deltas)
    assert max(cached_without) > 0
    with engine_of(model, tmp_path / "disk") as (engine, deltas):
        shutil.rmtree(str(engine.describe()["disk"]))
        histories, cached = two_rounds(engine, deltas)
    stats = engine.stats()
    assert stats.disk_failures > 0
    assert (histories, cached) == (expected, cached_without)
    assert stats.demotions_to_disk == 0


def test_a_closed_session_leaves_nothing_on_host_and_disk(model: Path, tmp_path: Path) -> None:
    with engine_of(model, tmp_path / "disk") as (engine, deltas):
        folder = Path(str(engine.describe()["disk"]))
        two_rounds(engine, deltas)
        assert list(folder.glob("*.kv"))
        for number in range(SESSIONS):
            engine.close_session(f"s{number}").result(WAIT_S)
        tiers = engine._cache.tiers
        while engine._call(lambda: tiers._write is not None or tiers.awaits_copies).result(WAIT_S):
            pass
        assert [account.used_bytes for account in tiers.accounts()] == [0, 0]
        write_lane = engine._runner._copies._write_lane  # type: ignore[attr-defined]
        write_lane.submit(lambda: None).result(WAIT_S)  # runs after the removal of files
        assert list(folder.glob("*.kv")) == []
