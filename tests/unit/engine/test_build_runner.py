"""How the runner is composed: what a step may have, and how much memory a card has left for KV."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import build_runner as composition
from engine.api import SamplingParams
from engine.attention.choose import AttentionChoice, choose_attention
from engine.attention.interface import AttentionUnavailable
from engine.batch import BatchItem, SampleSpec, ScheduledBatch
from engine.build_runner import (
    StepLimits,
    build_runner,
    choose_picker,
    kv_identity,
    make_rank,
    steps_beyond_graphs,
)
from engine.cpu.library import Kernels, find_kernels
from engine.memory import MemoryShort
from engine.models.errors import UnsupportedModel
from engine.models.loader import LoadedModel, load_model
from engine.models.ops import TorchOps
from engine.parallel.ranks import OneRank
from engine.runner.device_runner import DeviceRunner
from engine.runner.disk_folder import DiskUnavailable
from engine.runner.draft_model import DraftModel
from engine.runner.kv_pool import make_kv_pool
from engine.runner.sample_table import SampleTable, pick_by_row
from engine.runner.torch_runner import TorchRunner
from engine.settings import (
    CacheSettings,
    DeviceName,
    EngineSettings,
    ExecutionSettings,
    ModelSettings,
    PoolTooSmall,
    SchedulerSettings,
    SpeculationSettings,
)
from tests.unit.engine.tiny_llama import TINY_LLAMA

PAGE_BYTES = 2 * 2 * 16 * 4 * 4
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(TINY_LLAMA))
    return load_model(ModelSettings(str(directory), load_format="dummy", device="cpu"))


def test_limits_of_a_step() -> None:
    limits = StepLimits.of(SchedulerSettings(100, 50, 16), ExecutionSettings(decode_steps=4), 7)
    assert limits == StepLimits(rows=100, items=16, sampled=100, steps=4)
    assert StepLimits.of(SchedulerSettings(8, 8, 16), ExecutionSettings(), 0) == StepLimits(8, 8, 8, 1)


def test_a_cpu_gets_the_plain_runner_and_a_pool_of_fixed_size(loaded: LoadedModel) -> None:
    runner = build_runner(loaded, CacheSettings(page_size=4))
    assert isinstance(runner, TorchRunner)
    assert not runner.facts.runs_ahead
    assert runner.facts.num_pages == 256 * 2**20 // PAGE_BYTES
    assert runner.describe()["attention"] == ("cpu" if isinstance(find_kernels(), Kernels) else "torch")
    runner.close()


def test_what_a_page_s_bytes_depend_on_is_in_its_identity(loaded: LoadedModel) -> None:
    cache = CacheSettings(4, 4)
    half = replace(loaded, dtype=torch.bfloat16)
    variants = [
        build_runner(loaded, cache),
        build_runner(replace(loaded, fingerprint="other weights"), cache),
        build_runner(replace(loaded, weights_dtype=torch.bfloat16), cache),
        build_runner(half, cache),
        build_runner(loaded, cache, loaded, num_drafts=2),
    ]
    identities = [runner.facts.identity for runner in variants]
    fp8 = make_kv_pool(half.layout, replace(cache, kv_dtype="fp8"), half.dtype, half.device)
    identities.append(kv_identity(half, fp8, None))
    for build in ("avx2 0123", "avx2 4567"):
        pool = make_kv_pool(loaded.layout, cache, loaded.dtype, loaded.device)
        identities.append(kv_identity(replace(loaded, deterministic=build), pool, None))
    identities.append(kv_identity(replace(loaded, keeps_quantized=True), pool, None))
    identities.append(kv_identity(replace(loaded, native=False), pool, None))
    assert len(set(identities)) == len(variants) + 5
    again = build_runner(loaded, CacheSettings(4, 9))
    assert again.facts.identity == identities[0], "the pool's size is of no matter"
    assert identities[0].weights == loaded.fingerprint == again.describe()["model_fingerprint"]
    for runner in (*variants, again):
        runner.close()


def test_a_runner_s_memory_goes_with_its_last_reference(loaded: LoadedModel) -> None:
    """The next engine of the process sizes its pool by the memory that is free then."""
    gc.collect()
    gc.disable()
    try:
        runner = build_runner(loaded, CacheSettings(4, 4))
        runner.close()
        assert isinstance(runner, TorchRunner)
        pool = weakref.ref(runner._pool.full.kv_LJKSD)
        del runner
        assert pool() is None
    finally:
        gc.enable()


def test_the_backend_is_chosen_for_what_the_layers_ask(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that takes no sinks would fail at the first step. The draft model's layers have their own."""
    asked: list[int] = []

    def choose(*args: Any, sinks: int, **options: Any) -> AttentionChoice:
        asked.append(sinks)
        return choose_attention(*args, sinks=sinks, **options)

    monkeypatch.setattr(composition, "choose_attention", choose)
    for sinks in (0, 4):
        build_runner(replace(loaded, sinks=sinks), CacheSettings(4, 4), loaded, num_drafts=2).close()
    assert asked == [0, 0, 4, 0]


def test_what_cannot_run_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(AttentionUnavailable):
        build_runner(loaded, CacheSettings(4, 4), execution=ExecutionSettings(attention="flash"))
    with pytest.raises(AttentionUnavailable):
        build_runner(loaded, CacheSettings(4, 4, kv_dtype="fp8"))
    with pytest.raises(PoolTooSmall, match=r"cache\.size_mib"):
        build_runner(loaded, CacheSettings(4, size_bytes=PAGE_BYTES - 1))
    with pytest.raises(MemoryShort, match=r"cache\.host_mib"):
        build_runner(loaded, CacheSettings(4, 4, host_size_bytes=2**60))


def test_a_step_that_a_card_has_no_memory_for_names_its_settings(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composition, "is_gpu", lambda _device: True)
    monkeypatch.setattr(DeviceRunner, "rehearse", Mock(side_effect=torch.OutOfMemoryError("40 GiB")))
    with pytest.raises(MemoryShort, match=r"the largest step.*scheduler\.max_batch_tokens.*40 GiB"):
        build_runner(loaded, CacheSettings(4))
    with pytest.raises(MemoryShort, match=r"beside the KV pool.*execution\.max_graph_tokens, cache"):
        build_runner(loaded, CacheSettings(4, 4))


def test_a_disk_is_the_runners_as_long_as_it_runs(loaded: LoadedModel, tmp_path: Path) -> None:
    settings = CacheSettings(4, 4, disk_size_bytes=1000, disk_path=str(tmp_path / "kv"))
    runner = build_runner(loaded, settings)
    (folder,) = (path for path in (tmp_path / "kv").iterdir() if path.is_dir())
    assert runner.describe()["disk"] == str(folder)
    runner.close()
    assert not folder.exists()
    assert "disk" not in build_plain(loaded).describe()


def test_a_disk_that_cannot_be_written_to_is_an_error_at_start(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable, match="disk_path"):
        build_runner(loaded, CacheSettings(4, 4, disk_size_bytes=1000, disk_path=str(tmp_path / "file")))
    with pytest.raises(DiskUnavailable, match="disk_path"):
        build_runner(loaded, CacheSettings(4, 4, disk_size_bytes=1000))


def test_the_pool_takes_what_the_largest_step_leaves(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that is tried has as many rows, items and samples as there may be. Its peak is kept free, and graphs
    keep the peak of the largest graph."""
    rehearsed: list[Any] = []
    forward = loaded.model.forward
    logits = loaded.model.logits
    monkeypatch.setattr(
        loaded.model, "forward", lambda *args: rehearsed.append(len(args[0])) or forward(*args)
    )
    monkeypatch.setattr(loaded.model, "logits", lambda rows: rehearsed.append(len(rows)) or logits(rows))
    monkeypatch.setattr(composition, "peak_bytes", lambda _device: 1000 * rehearsed[-2] + rehearsed[-1])
    monkeypatch.setattr(composition, "memory_room", lambda _device, share, reserve: (share, reserve))
    limits = StepLimits(rows=40, items=5, sampled=9, steps=2)
    for graphs, expected in ((False, [40, 9]), (True, [40, 9, 16, 9])):
        rehearsed.clear()
        execution = ExecutionSettings(graphs=graphs, max_graph_tokens=16)
        room = composition._room_bytes(loaded, CacheSettings(4), None, execution, limits, OneRank())
        assert rehearsed == expected
        assert room == (0.9, 40_009 + (16_009 if graphs else 0))


def test_the_pool_leaves_room_for_the_attention_of_both_models(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds a workspace, with FlashAttention 3 of up to 512 MiB. The draft model's was allocated once the pool had
    taken all there was."""
    made: list[LoadedModel] = []
    before: list[LoadedModel] = []
    attention_of, draft = composition.attention_of, replace(loaded)

    def made_for(model: LoadedModel, *others: Any) -> AttentionChoice:
        made.append(model)
        return attention_of(model, *others)

    def room(*_: Any) -> int:
        before.extend(made)
        return 10 * PAGE_BYTES

    monkeypatch.setattr(composition, "is_gpu", lambda _device: True)
    monkeypatch.setattr(composition, "attention_of", made_for)
    monkeypatch.setattr(composition, "memory_room", room)
    build_runner(loaded, CacheSettings(4), draft, num_drafts=2).close()
    assert before == [loaded, draft]


@pytest.mark.parametrize(
    ("execution", "for_memory"),
    [
        (ExecutionSettings(max_graph_tokens=16), [(40, 5), (16, 16)]),
        (ExecutionSettings(max_graph_tokens=64), [(40, 5), (40, 40)]),
        (ExecutionSettings(graphs=False, decode_steps=4), [(40, 5)]),
    ],
    ids=["graphs", "all in graphs", "no graphs"],
)
def test_the_runner_of_a_gpu_is_put_together(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    execution: ExecutionSettings,
    for_memory: list[tuple[int, ...]],
) -> None:
    """The GPU is a CPU in disguise. Steps are tried for their memory first, then for their kernels."""
    tried = [*for_memory, *steps_beyond_graphs(StepLimits(40, 5, 5, 1), execution), (40, 5)]
    rehearsed: list[tuple[int, ...]] = []
    rehearse = DeviceRunner.rehearse
    monkeypatch.setattr(DeviceRunner, "rehearse", lambda *args: rehearsed.append(args[1:]) or rehearse(*args))
    monkeypatch.setattr(composition, "is_gpu", lambda _device: True)
    monkeypatch.setattr(composition, "memory_room", lambda *_: 10 * PAGE_BYTES)
    limits = SchedulerSettings(max_batch_tokens=40, chunk_size=16, max_running=5)
    runner = build_runner(loaded, CacheSettings(4), scheduler=limits, execution=execution)
    assert isinstance(runner, DeviceRunner)
    assert rehearsed == tried
    assert (runner.facts.num_pages, runner.facts.runs_ahead) == (10, True)
    plain = build_plain(loaded)
    item = BatchItem("a", [1, 2, 3], 0, np.arange(2, dtype=np.int32), True, SampleSpec(GREEDY))
    expected = plain.launch(ScheduledBatch([item])).result()
    assert runner.launch(ScheduledBatch([item])).result() == expected
    runner.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_picks_are_rehearsed(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """Edited logits are in float32. The kernel for those used to be compiled at the first request with a penalty. What
    a kernel writes behind some rows' numbers is aligned as it is for one, two, three or four rows."""
    picked: list[tuple[torch.dtype, int]] = []

    def pick(logits_RV: Tensor, table: SampleTable, out_R: Tensor) -> None:
        picked.append((logits_RV.dtype, len(logits_RV)))
        pick_by_row(logits_RV.float(), table, out_R)

    logits = loaded.model.logits
    monkeypatch.setattr(loaded.model, "logits", lambda rows: logits(rows).bfloat16())
    monkeypatch.setattr(composition, "choose_picker", lambda _device: pick)
    monkeypatch.setattr(composition, "is_gpu", lambda _device: True)
    limits = SchedulerSettings(max_batch_tokens=40, chunk_size=16, max_running=5)
    execution = ExecutionSettings(graphs=graphs)
    build_runner(loaded, CacheSettings(4, 10), scheduler=limits, execution=execution).close()
    dtypes, rows = (torch.float32, torch.bfloat16), (1, 2, 3, 4, 5)
    assert {(dtype, count) for dtype in dtypes for count in rows} <= set(picked)


def test_a_draft_model_is_rehearsed_with_steps_of_every_kind(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no graphs. Kernels for some tokens of a prompt, and for decodes beside them, used to be compiled by the
    first such step."""
    rehearsed: list[tuple[int, int, int]] = []

    def run(_draft: DraftModel, work: list[BatchItem]) -> list[int]:
        lens = [len(item.token_ids) for item in work]
        rehearsed.append((sum(lens), len(lens), max(lens)))
        return []

    monkeypatch.setattr(DraftModel, "_run", run)
    monkeypatch.setattr(composition, "is_gpu", lambda _device: True)
    scheduler = SchedulerSettings(max_batch_tokens=40, chunk_size=16, max_running=5)
    build_runner(loaded, CacheSettings(4, 10), loaded, scheduler=scheduler, num_drafts=2).close()
    assert rehearsed == steps_beyond_graphs(StepLimits(40, 5, 15, 1), ExecutionSettings(graphs=False))


def test_steps_beyond_graphs_have_items_of_every_length() -> None:
    """There are steps with many tokens of one request, with a few of each of many, and decodes that graphs do not
    cover."""
    limits = StepLimits(rows=2048, items=64, sampled=512, steps=1)
    steps = steps_beyond_graphs(limits, ExecutionSettings(max_graph_tokens=256))
    assert {longest for _, _, longest in steps} == {2**power for power in range(3, 12)}
    assert {(257, 33, 8), (512, 64, 8), (1025, 2, 1024), (2048, 1, 2048)} <= set(steps)
    assert all(257 <= rows <= 2048 and items <= 64 for rows, items, _ in steps)
    assert all(longest <= rows <= items * longest for rows, items, longest in steps)
    assert {(1, 1, 1), (64, 64, 1)} <= set(steps_beyond_graphs(limits, ExecutionSettings(graphs=False)))
    assert (65, 2, 64) in steps_beyond_graphs(limits, ExecutionSettings(graphs=False))
    assert (257, 257, 1) in steps_beyond_graphs(StepLimits(2048, 300, 300, 1), ExecutionSettings())
    assert steps_beyond_graphs(StepLimits(256, 64, 64, 1), ExecutionSettings()) == []


def build_plain(loaded: LoadedModel) -> TorchRunner:
    pool = make_kv_pool(loaded.layout, CacheSettings(4, 10), loaded.dtype, loaded.device)
    choice = choose_attention("auto", pool, loaded.device)
    return composition.careful_runner(loaded, pool, choice, None, ExecutionSettings())


def test_a_given_size_asks_the_card_for_nothing(loaded: LoadedModel) -> None:
    for cache in (CacheSettings(4, num_pages=9), CacheSettings(4, size_bytes=10_000)):
        limits = StepLimits(8, 2, 2, 1)
        assert composition._room_bytes(loaded, cache, None, ExecutionSettings(), limits, OneRank()) == 0


def test_a_cpu_picks_by_row() -> None:
    assert choose_picker(torch.device("cpu")) is pick_by_row


def test_the_draft_model_has_the_operators_of_its_device_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    model = ModelSettings(str(tmp_path), load_format="dummy", device="cpu")
    chosen, given = TorchOps(), []

    def load(settings: ModelSettings, **options: Any) -> Any:
        given.append(options.get("ops"))
        return load_model(settings, **options)

    monkeypatch.setattr(composition, "choose_ops", lambda _device: chosen)
    monkeypatch.setattr(composition, "load_model", load)
    speculation = SpeculationSettings(method="draft", draft_model=model)
    runner, _ = make_rank(EngineSettings(model, CacheSettings(4, 4), speculation=speculation), OneRank())
    runner.close()
    assert given == [chosen, chosen]


def test_a_draft_model_is_on_the_model_s_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host takes pages of both: on two devices each failed, and no session's KV was kept there."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    model = ModelSettings(str(tmp_path), load_format="dummy", device="cpu")
    given: list[str] = []

    def load(settings: ModelSettings, **options: Any) -> Any:
        given.append(settings.device)
        return load_model(settings, **options)

    def settings(device: DeviceName) -> EngineSettings:
        speculation = SpeculationSettings(method="draft", draft_model=replace(model, device=device))
        return EngineSettings(model, CacheSettings(4, 4), speculation=speculation)

    monkeypatch.setattr(composition, "load_model", load)
    make_rank(settings("auto"), OneRank())[0].close()
    assert given == ["cpu", "cpu"]
    with pytest.raises(UnsupportedModel, match=r"draft_model\.device is 'cuda', the model is on 'cpu'"):
        make_rank(settings("cuda"), OneRank())


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    models = []
    for vocab_size in (50, 51):
        folder = tmp_path / str(vocab_size)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"vocab_size": vocab_size}))
        models.append(ModelSettings(str(folder), load_format="dummy", device="cpu"))
    speculation = SpeculationSettings(method="draft", draft_model=models[1])
    settings = EngineSettings(models[0], CacheSettings(4, 4), speculation=speculation)
    with pytest.raises(UnsupportedModel, match="a vocabulary of 51 tokens, the model one of 50"):
        make_rank(settings, OneRank())
