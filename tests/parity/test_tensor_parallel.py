"""Two ranks that share a model give what one rank gives: logits are close, greedy tokens are equal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import FinishReason, GenerateRequest, LogprobParams, SamplingParams
from engine.attention.interface import AttentionItem
from engine.attention.torch_backend import TorchAttention
from engine.models.loader import load_model
from engine.parallel.ranks import OneRank, RankGroup
from engine.runner.kv_pool import make_kv_pool
from engine.settings import (
    CacheSettings,
    EngineSettings,
    ExecutionSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from tests.unit.engine.driver import Outcome
from tests.unit.engine.ladder import Ladder
from tests.unit.engine.parallel.device_ranks import answers
from tests.unit.engine.parallel.parallel_rig import ParallelRig, write_model
from tests.unit.engine.parallel.test_process_ranks import groups, on_each

pytestmark = pytest.mark.slow

EMBEDDED = Path(__file__).parents[2] / "assets" / "models" / "kedge-chat"
DRAFT = EMBEDDED.with_name("kedge-chat-draft")
NEAR_TIE = 1e-4
"""Two tokens whose log-probabilities differ by less may swap places, because the order of a sum differs."""
HOST_BYTES = 24 * 16 * 4096
"""About 24 pages of the embedded model, for its two ranks together."""

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (2, {}),
    "llama, tied, biased": (2, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2, one kv head": (2, {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 1}),
    "qwen3": (2, {"architectures": ["Qwen3ForCausalLM"], "head_dim": 10}),
    "mistral, window": (2, {"architectures": ["MistralForCausalLM"], "sliding_window": 6}),
    "four ranks, two kv heads": (4, {"vocab_size": 103}),
}


def logits(settings: ModelSettings, ranks: RankGroup) -> torch.Tensor:
    """The logits after each of 20 tokens, computed in two chunks."""
    loaded = load_model(settings, ranks=ranks)
    pool = make_kv_pool(loaded.layout, CacheSettings(4, 8, window_ratio=1.0), loaded.dtype, loaded.device)
    tokens = torch.tensor(np.random.default_rng(4).integers(0, 100, 20))
    table, rows = np.arange(8, dtype=np.int32), []
    with torch.inference_mode():
        for begin, end in ((0, 13), (13, 20)):
            slots = torch.arange(begin, end)
            item = AttentionItem(end - begin, end, table, True, table if pool.window else None)
            step = TorchAttention(pool).begin([item], (slots, slots) if pool.window else (slots,))
            rows.append(loaded.model.forward(tokens[begin:end], slots, step))
        return loaded.model.logits(torch.cat(rows))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_close(tmp_path: Path, name: str) -> None:
    size, changes = MODELS[name]
    settings = write_model(tmp_path, **changes)
    _strengthen(settings, tmp_path)
    checkpoint = ModelSettings(settings.path, device="cpu", num_threads=1)
    expected = logits(checkpoint, OneRank())
    assert expected.std() > 0.1
    for got in on_each(groups(size), lambda ranks: logits(checkpoint, ranks)):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def _strengthen(settings: ModelSettings, directory: Path) -> None:
    """Writes a checkpoint of random weights far from zero, biases included. So anything left out or added twice
    shows."""
    from safetensors.torch import save_file

    from engine.models.config import parse_spec, read_config
    from engine.models.tensor_shapes import tensor_shapes

    generator = torch.Generator().manual_seed(5)
    shapes = tensor_shapes(parse_spec(read_config(Path(settings.path))))
    tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")


@pytest.fixture(scope="module", params=["off", "draft"])
def rigs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ParallelRig, ParallelRig]]:
    """A rig with one rank and a rig with two, of the embedded model. The pools are too small for all sessions, and host
    memory is small. All three ranks keep KV below the same path on disk. Each rank holds the whole draft model."""
    disk = tmp_path_factory.mktemp("disk")
    model = ModelSettings(str(EMBEDDED), device="cpu", num_threads=1)
    draft = ModelSettings(str(DRAFT), device="cpu", num_threads=1)
    options: dict[str, Any] = {
        "cache": CacheSettings(
            16, 28, host_size_bytes=HOST_BYTES, disk_size_bytes=2**26, disk_path=str(disk), books="strict"
        ),
        "scheduler": SchedulerSettings(48, 16, 4),
    }
    if request.param == "draft":
        options["speculation"] = SpeculationSettings(
            "draft", 3, draft_model=draft, row_cost=0.0, draft_cost=0.0
        )
    with ThreadPoolExecutor(2) as pool:
        pair = list(pool.map(lambda size: ParallelRig(model, size, **options), (1, 2)))
    yield pair[0], pair[1]
    assert len([path for path in disk.iterdir() if path.is_dir()]) == 3
    for rig in pair:
        rig.stop()
    assert [path for path in disk.iterdir() if path.is_dir()] == []


def test_sessions_give_the_same_tokens(rigs: tuple[ParallelRig, ParallelRig]) -> None:
    """The pool holds half of the sessions. Prompts come in chunks, batches have several items, and both ranks copy KV
    to the host, to disk and back."""
    rng = random.Random(8)
    alone, together = rigs
    histories: dict[str, list[int]] = {f"s{index}": [] for index in range(6)}
    ties = 0
    for turn in range(5):
        names = rng.sample(sorted(histories), min(len(histories), 5))
        specs = [_turn(rng, name, turn, histories[name]) for name in names]
        pairs = zip(alone.generate(*specs), together.generate(*specs), strict=True)
        for name, spec, (expected, got) in zip(names, specs, pairs, strict=True):
            assert expected.reason is FinishReason.LENGTH
            assert got.reason is FinishReason.LENGTH, got.finish
            if got.token_ids == expected.token_ids:
                histories[name] = [*spec.history, *spec.new_tokens, *expected.token_ids]
                continue
            places = zip(expected.token_ids, got.token_ids, strict=True)
            first = next(place for place, (a, b) in enumerate(places) if a != b)
            best, second = (logprob for _, logprob in expected.logprobs[first].top)
            assert best - second < NEAR_TIE, (name, first)
            ties += 1
            del histories[name]  # from here on the two answers differ
    assert ties <= 1
    stats = together.engine.stats()
    assert stats.promotions_from_host + stats.promotions_from_disk > 0
    assert stats.demotions_to_disk > 0
    assert stats.disk_failures == 0
    assert together.engine.audit().result(30.0).clean


def _turn(rng: random.Random, name: str, turn: int, history: list[int]) -> GenerateRequest:
    return GenerateRequest(
        f"{name}/{turn}",
        [rng.randrange(300, 900) for _ in range(rng.randrange(3, 40))],
        history=history,
        history_len=len(history),
        session_id=name,
        sampling=SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True),
        logprobs=LogprobParams(output=True, top=2),
    )


def test_the_gpus_runner_with_every_kind_of_request(tmp_path: Path) -> None:
    """Steps launched before the last one's result is known, several steps in one launch, sampling, penalties, scores
    and masks. Both ranks take each step in the same way."""
    model = write_model(tmp_path)
    kinds: list[dict[str, Any]] = [
        {"sampling": SamplingParams(30, 0.0)},
        {"sampling": SamplingParams(25, 0.8, top_p=0.9, top_k=20, seed=3)},
        {"sampling": SamplingParams(20, 0.7, presence_penalty=0.5, seed=4)},
        {"sampling": SamplingParams(15, 0.0, logit_bias={5: 2.0}, frequency_penalty=0.3)},
        {"sampling": SamplingParams(12, 0.0), "logprobs": LogprobParams(output=True, top=2, input_start=0)},
        {"sampling": SamplingParams(0, 0.0), "logprobs": LogprobParams(input_start=0)},
    ]
    rng = random.Random(6)
    requests = [
        GenerateRequest(f"r{index}", [rng.randrange(100) for _ in range(rng.randrange(2, 40))], **kind)
        for index, kind in enumerate(kinds * 2)
    ]

    def told(size: int) -> list[Outcome]:
        held = GenerateRequest(
            "held", [5, 6, 7], SamplingParams(30, 0.9, seed=5), constraint=Ladder([4] * 12)
        )
        execution = ExecutionSettings("torch", max_graph_tokens=16, decode_steps=4, tensor_parallel=size)
        settings = EngineSettings(
            model,
            CacheSettings(4, 200, books="strict"),
            SchedulerSettings(48, 16, 6),
            SpeculationSettings("ngram", 3, row_cost=0.0),
            execution,
        )
        return answers(settings, [*requests[:4], held, *requests[4:]])

    for expected, got in zip(told(1), told(2), strict=True):
        assert got.finish == expected.finish
        assert got.reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert got.token_ids == expected.token_ids
        scores = ([entry.logprob or 0.0 for entry in outcome.input_logprobs] for outcome in (got, expected))
        assert next(scores) == pytest.approx(next(scores), abs=1e-4)
